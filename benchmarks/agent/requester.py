"""Sends requests over MQTT, one after the other, several at once or at a rate, and times their answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from agent.mqtt.connection import Connection
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.mqtt.session import Owner
from agent.mqtt.settings import BrokerSettings
from agent.wire.topics import Infer, ModelState, Reply, format_topic, reply_filter
from benchmarks.agent.stage import DEVICE

ANSWER_LIMIT_S: Final = 60.0
NAME: Final = "bench-requester"


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer.

    Attributes
    ----------
    sent_s, latency_s
        When the request was sent (`time.perf_counter`), and the seconds until the answer arrived.
    status, version, payload
        The answer. One of the echo has status 0 and an empty version.
    """

    sent_s: float
    latency_s: float
    status: int
    version: str
    payload: bytes


@dataclass
class Tally:
    """The results of many requests."""

    answers: list[Answered] = field(default_factory=list)
    unanswered: int = 0

    @property
    def statuses(self) -> Counter[int]:
        """Status -> number of answers."""
        return Counter(answer.status for answer in self.answers)

    def latencies_s(self, status: int | None = None) -> list[float]:
        """Return the latencies of answers, in ascending order."""
        return sorted(a.latency_s for a in self.answers if status is None or a.status == status)


class Requester:
    """An MQTT client that sends requests.

    Parameters
    ----------
    port
        The broker's port.
    name
        The client id; a second client with the same one would disconnect the first.
    """

    def __init__(self, port: int, name: str = NAME) -> None:
        self._name = name
        settings = BrokerSettings("127.0.0.1", port)
        self._connection = Connection(settings, Owner(self._received), client_id=name)
        self._numbers = itertools.count()
        self._waiting: dict[bytes, tuple[float, asyncio.Future[Answered]]] = {}
        self._states: dict[str, bytes] = {}

    async def __aenter__(self) -> Requester:
        await self._connection.connect()
        await self._connection.subscribe(reply_filter(self._name))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    async def ready(self, model: str, limit_s: float = 60.0) -> None:
        """Wait until the agent serves a model."""
        topic = format_topic(ModelState(DEVICE, model))
        await self._connection.subscribe(topic, 0)
        async with asyncio.timeout(limit_s):
            while b'"ready":true' not in self._states.get(topic, b""):
                await asyncio.sleep(0.01)

    def topic_of(self, model: str) -> str:
        """Return the topic of this client's requests to a model."""
        return format_topic(Infer(DEVICE, model, self._name))

    def send(self, topic: str, payload: bytes, qos: int = 1) -> asyncio.Future[Answered]:
        """Send a request; return a future that gets the answer."""
        name = b"%d" % next(self._numbers)
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        properties = Properties(
            content_type="application/octet-stream",
            response_topic=format_topic(Reply(self._name, "a")),
            correlation_data=name,
            expiry_s=int(ANSWER_LIMIT_S),
        )
        self._waiting[name] = time.perf_counter(), answer
        self._connection.publish(topic, payload, qos=qos, properties=properties)
        return answer

    async def in_turn(self, topic: str, payload: bytes, count: int) -> Tally:
        """Send `count` requests, each when the one before is answered."""
        tally = Tally()
        for _ in range(count):
            tally.answers.append(await asyncio.wait_for(self.send(topic, payload), ANSWER_LIMIT_S))
        return tally

    async def at_once(self, topic: str, payload: bytes, width: int, seconds: float) -> tuple[Tally, float]:
        """Keep `width` requests in flight for `seconds`; return the answers and the exact time.

        If no answer comes in that time, the time goes on to the first one: there is always one to count.
        """
        tally = Tally()
        start_s = time.perf_counter()
        end_s = start_s + seconds
        last_s = start_s

        async def ask() -> None:
            nonlocal last_s
            while time.perf_counter() < end_s:
                answer = await self.send(topic, payload)
                now_s = time.perf_counter()
                if now_s <= end_s or not tally.answers:
                    tally.answers.append(answer)
                    last_s = now_s

        await asyncio.gather(*(ask() for _ in range(width)))
        return tally, last_s - start_s

    async def at_rate(self, topic: str, payload: bytes, per_s: float, stop: asyncio.Event) -> Tally:
        """Send requests at a rate, regardless of answers, until `stop`; then wait for the answers."""
        under_way: list[asyncio.Future[Answered]] = []
        start_s = time.perf_counter()
        while not stop.is_set():
            due = int((time.perf_counter() - start_s) * per_s)
            under_way += [self.send(topic, payload) for _ in range(due - len(under_way))]
            await asyncio.sleep(min(0.01, 1 / per_s))
        done, late = await asyncio.wait(under_way, timeout=ANSWER_LIMIT_S)
        return Tally([future.result() for future in done], len(late))

    def _received(self, message: Message) -> None:
        name = message.properties.correlation_data
        if name is None:
            self._states[message.topic] = message.payload
        elif (waiting := self._waiting.pop(name, None)) is not None:
            sent_s, answer = waiting
            properties = message.properties
            status = int(properties.first("__stat") or 0)
            version = properties.first("model_version") or ""
            latency_s = time.perf_counter() - sent_s
            answer.set_result(Answered(sent_s, latency_s, status, version, message.payload))
        self._connection.ack(message)
