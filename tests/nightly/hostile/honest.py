"""An honest client that asks each model in turn, and never accepts a late or a wrong answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import secrets
import struct
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire.topics import (
    GroupInfer,
    Infer,
    Metrics,
    Reply,
    State,
    format_topic,
    parse_topic,
    reply_filter,
)

# What the campaign promises: an answer within this time, and one of these statuses.
ANSWER_LIMIT_S: Final = 5.0
ALLOWED: Final = frozenset({200, 503})


@dataclass
class Honest:
    """A client that asks at a steady rate.

    Attributes
    ----------
    port, user, device
        The broker's port, who asks, and who is asked.
    pause_s
        Between two requests.
    repeat_s
        After this long without an answer, a request is sent again, as the clients of edgebundle do.
    group
        The group that is asked in place of the device.
    statuses
        Status -> number of answers.
    complaints
        One line for each answer that is wrong, late or missing.
    latencies_s
        From request to answer.
    presence
        What the device said about itself, each change once.
    metrics
        The last metrics of the device, as they arrived.
    """

    port: int
    user: str
    device: str
    pause_s: float = 0.05
    repeat_s: float = ANSWER_LIMIT_S
    group: str = ""
    statuses: Counter[int] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    presence: list[bytes] = field(default_factory=list)
    metrics: bytes = b""

    def __post_init__(self) -> None:
        self._waiting: dict[bytes, asyncio.Future[Message]] = {}
        folder = f"{self.group or self.device}/{secrets.token_hex(8)}"
        self._reply = Reply(self.user, f"{folder}/answers")
        self._filter = reply_filter(self.user, folder)
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        settings = BrokerSettings("127.0.0.1", self.port, username=self.user)
        self._connection = Connection(settings, Owner(self._take), client_id=f"honest-{secrets.token_hex(8)}")

    @property
    def asked(self) -> int:
        """How many requests have an outcome."""
        return sum(self.statuses.values()) + sum("no answer" in line for line in self.complaints)

    async def run(self) -> None:
        """Ask until cancelled; then wait for the last answers."""
        await self._connection.connect()
        await self._connection.subscribe(self._filter)
        await self._connection.subscribe(format_topic(State(self.device)), 0)
        await self._connection.subscribe(format_topic(Metrics(self.device)), 0)
        try:
            for model, payload, content_type, expected in _requests():
                task = asyncio.create_task(self._ask(model, payload, content_type, expected))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                await asyncio.sleep(self.pause_s)
        finally:
            await asyncio.gather(*self._running)
            await self._connection.close()

    async def ask_absent(self, limit_s: float) -> bool:
        """Ask for a model that no device has; return whether the refusal came within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._send("absent", b"", "application/octet-stream", limit_s)
        except TimeoutError:
            return False
        return True

    async def _ask(self, model: str, payload: bytes, content_type: str, expected: bytes) -> None:
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                answer = await self._send(model, payload, content_type, ANSWER_LIMIT_S)
        except TimeoutError:
            self.complaints.append(f"{model}: no answer within {ANSWER_LIMIT_S:g} s")
            return
        self.latencies_s.append(time.monotonic() - began_s)
        status = int(answer.properties.first("__stat") or "0")
        self.statuses[status] += 1
        if status not in ALLOWED:
            self.complaints.append(f"{model}: status {status}: {answer.properties.first('__stMsg')}")
        elif status == 200 and bytes(answer.payload) != expected:
            self.complaints.append(f"{model}: the answer to another request")

    async def _send(self, model: str, payload: bytes, content_type: str, limit_s: float) -> Message:
        correlation = b"%d-%s" % (next(self._numbers), secrets.token_bytes(6))
        self._waiting[correlation] = answered = asyncio.get_running_loop().create_future()
        tensor = (("tensor", "x;FP32;4"),) if content_type == "application/octet-stream" else ()
        properties = Properties(
            content_type=content_type,
            response_topic=format_topic(self._reply),
            correlation_data=correlation,
            expiry_s=max(1, round(limit_s)),
            user=(*tensor, ("accept", "application/octet-stream")),
        )
        infer = Infer(self.device, model, self.user)
        topic = format_topic(GroupInfer(self.group, model, self.user) if self.group else infer)
        try:
            while True:
                self._connection.publish(topic, payload, properties=properties)
                await asyncio.wait([answered], timeout=self.repeat_s)
                if answered.done():
                    return answered.result()
        finally:
            del self._waiting[correlation]

    def _take(self, message: Message) -> None:
        topic = parse_topic(message.topic)
        payload = bytes(message.payload)
        if isinstance(topic, State):
            if payload not in self.presence[-1:]:
                self.presence.append(payload)
        elif isinstance(topic, Metrics):
            self.metrics = payload
        elif topic == self._reply:
            waiting = self._waiting.get(message.properties.correlation_data or b"")
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        self._connection.ack(message)


def _requests() -> Iterator[tuple[str, bytes, str, bytes]]:
    """Yield model, payload, content type and the right answer, for ever."""
    picture, doubled = _picture()
    for number in itertools.count():
        values = (1.0, float(number % 1000), 2.0, 0.5)
        right = struct.pack("<4f", *(2 * value for value in values))
        yield "twice", struct.pack("<4f", *values), "application/octet-stream", right
        yield "segfault", struct.pack("<4f", *values), "application/octet-stream", right
        yield "picture", picture, "image/png", doubled


def _picture() -> tuple[bytes, bytes]:
    from PIL import Image

    image = Image.new("L", (2, 2))
    image.putdata([0, 50, 100, 150])
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), struct.pack("<4f", 0, 100, 200, 300)


@contextlib.asynccontextmanager
async def asking(client: Honest):  # type: ignore[no-untyped-def]  # noqa: ANN201 - a context manager of None
    """Let an honest client ask while the block runs."""
    task = asyncio.create_task(client.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
