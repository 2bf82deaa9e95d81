"""Ask an agent, again and again until its deadline, for one answer.

Promises: one answer, or an error that says why there is none. A request is sent again under the same name
until an answer comes, so a broker or an agent that restarts in between costs time alone; the agent
remembers what it answered and does not run the model twice. Only a refusal for lack of room (503) is asked
again under a new name.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire import topics
from builder.errors import FleetError
from builder.fleet.answer import OK, OVERLOADED, Answer, Output, Prediction, read_answer
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.desired import parse_object
from builder.fleet.presence import ABSENT_LIMIT_S, Presence, absent
from builder.fleet.request import JSON, RAW, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from agent.mqtt.reason_codes import Reason

# The first time to ask again; it grows by half each time. A model of seconds is asked for twice at most.
RESEND_S: Final = 2.0
LONGEST_RESEND_S: Final = 15.0
# A full queue of a model of 100 ms is half empty after a few seconds.
OVERLOAD_PAUSE_S: Final = 0.2
# How long to wait for what the agent has left with the broker, when an answer may need it.
STATE_LIMIT_S: Final = 2.0
# MQTT 5.0, 3.4.2.1: the broker took it, and nobody has subscribed to it.
NO_SUBSCRIBERS: Final = 0x10
AGENTS_HINT: Final = "`edgebundle agents` lists who is there, and with which models"


@dataclass(frozen=True, slots=True)
class InferResult:
    """An answer.

    Attributes
    ----------
    status
        200, or what the agent says is wrong: 400 the request, 404 no such model, 408 too late, 415 the
        content type, 500 the model, 503 too much to do.
    version
        Of the model that answered.
    latency_s
        From the first time it was sent to the answer.
    attempts
        How often it was sent.
    """

    agent: str
    model: str
    status: int
    message: str
    version: str
    outputs: tuple[Output, ...] = field(repr=False)
    top: tuple[Prediction, ...]
    latency_s: float
    attempts: int

    @property
    def ok(self) -> bool:
        """Whether it is the model's answer and no refusal."""
        return self.status == OK


def infer(
    agent: str,
    model: str,
    what: Request | Mapping[str, np.ndarray[Any, Any]] | bytes | str | Path,
    broker: Broker,
    *,
    deadline_s: float = 30.0,
    notice: Callable[[str], None] | None = None,
) -> InferResult:
    """Ask a model on an agent.

    Parameters
    ----------
    agent, model
        Whom.
    what
        An image's bytes; a path of an image, an `.npz` or a `.json`; arrays by input name; or a request.
    deadline_s
        How long an answer is of use; the agent does not start to compute later than that.
    notice
        Called with one line when there is something to wait for: the agent is away.

    Raises
    ------
    FleetError
        If no answer came in time, or the broker knows no such agent.
    PackageError
        If `what` is nothing that can be asked.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    asking = infer_async(agent, model, _request(what), broker, deadline_s=deadline_s, notice=notice)
    return asyncio.run(asking)


def _request(what: Request | Mapping[str, np.ndarray[Any, Any]] | bytes | str | Path) -> Request:
    if isinstance(what, Request):
        return what
    if isinstance(what, bytes):
        return Request.image(what)
    if isinstance(what, str | Path):
        return Request.from_file(Path(what))
    return Request.arrays(what)


async def infer_async(
    agent: str,
    model: str,
    request: Request,
    broker: Broker,
    *,
    deadline_s: float = 30.0,
    notice: Callable[[str], None] | None = None,
) -> InferResult:
    """Do what `infer` does, in a running event loop."""
    try:
        where = topics.format_topic(topics.Infer(agent, model))
    except ValueError as error:
        raise FleetError(
            f"{agent!r:.80} and {model!r:.80} cannot be the names of an agent and a model"
        ) from error
    asking = _Asking(agent, model, where, request, notice or (lambda _line: None))
    async with Client(broker, asking.on_message, on_up=asking.on_up) as client:
        result = await asking.run(client, deadline_s)
    if result is None:
        raise await absent(agent, broker)
    return result


class _Asking:
    """One question, from this side."""

    def __init__(
        self, agent: str, model: str, where: str, request: Request, notice: Callable[[str], None]
    ) -> None:
        self._agent = agent
        self._model = model
        self._where = where
        self._request = request
        self._notice = notice
        self._presence = Presence(agent)
        self._ups = 0
        self._unheard = False
        self._inputs: dict[str, TensorSpec] | None = None
        self._name = b""
        self._answer: asyncio.Future[Message] | None = None
        self._told = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._attempts = 0

    async def run(self, client: Client, deadline_s: float) -> InferResult | None:
        """Ask until there is an answer; None when there is nobody to ask."""
        await client.subscribe(topics.reply_filter(client.name), 1)
        self._presence.want(client)
        client.want(topics.format_topic(topics.ModelState(self._agent, self._model)), 0)
        began = time.monotonic()
        end = began + deadline_s
        if not client.speaks_5 and self._request.content_type not in (JSON, RAW):
            await self._wait_for_inputs(min(end, began + STATE_LIMIT_S))
        pause_s = OVERLOAD_PAUSE_S
        while True:
            answer = await self._ask(client, began, end)
            if answer is None:
                return None
            if answer.status != OVERLOADED or time.monotonic() + pause_s >= end:
                break
            await asyncio.sleep(pause_s)
            pause_s *= 2
        return InferResult(
            agent=self._agent,
            model=self._model,
            status=answer.status,
            message=answer.message,
            version=answer.version,
            outputs=answer.outputs,
            top=answer.top(),
            latency_s=time.monotonic() - began,
            attempts=self._attempts,
        )

    def on_message(self, topic: topics.Topic, message: Message) -> None:
        """Take an answer, or what the agent says about itself."""
        self._presence.on_message(topic, message)
        match topic:
            case topics.ModelState(self._agent, self._model):
                self._inputs = _inputs(parse_object(message.payload))
                self._told.set()
            case topics.Reply(_, suffix):
                ours = suffix == self._name.decode()
                if ours and self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)

    def on_up(self) -> None:
        """Ask again at once: what was under way may be lost."""
        self._ups += 1
        self._reconnected.set()

    def _published(self, verdict: asyncio.Future[Reason]) -> None:
        """Note whether the request met anybody, as a broker of MQTT 5 tells."""
        if not verdict.cancelled() and verdict.exception() is None:
            self._unheard = verdict.result().code == NO_SUBSCRIBERS

    def _nobody_there(self, waited_s: float) -> bool:
        """Whether the agent has neither subscribed nor left a word, at a broker that was there all the time.

        One that restarted may have forgotten an agent that is on its way back.
        """
        known = self._presence.state or self._ups > 1
        return self._unheard and not known and waited_s >= ABSENT_LIMIT_S

    async def _ask(self, client: Client, began: float, end: float) -> Answer | None:
        """Send the request under one name until its answer comes."""
        self._name = secrets.token_hex(8).encode()
        self._answer = asyncio.get_running_loop().create_future()
        reply_to = topics.format_topic(topics.Reply(client.name, self._name.decode()))
        document: bytes | None = None
        resend_s = RESEND_S
        while True:
            waited_s, left_s = time.monotonic() - began, end - time.monotonic()
            if self._nobody_there(waited_s):
                return None
            if left_s <= 0:
                raise self._nothing(waited_s)
            if self._attempts == 1 and self._presence.away:
                self._notice(f"{self._presence.away}; waiting for {left_s:.0f} s more")
            self._attempts += 1
            self._reconnected.clear()
            if client.speaks_5:
                properties = self._properties(reply_to, left_s)
                verdict = client.publish(self._where, self._request.body, properties=properties)
                verdict.add_done_callback(self._published)
            else:
                # The same bytes each time: the agent knows a request again by them.
                document = document or self._document(reply_to, left_s)
                client.publish(self._where, document)
            woken: asyncio.Future[Any] = asyncio.ensure_future(self._reconnected.wait())
            either: set[asyncio.Future[Any]] = {self._answer, woken}
            try:
                await asyncio.wait(either, timeout=min(resend_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            if self._answer.done():
                return read_answer(self._answer.result())
            resend_s = min(1.5 * resend_s, LONGEST_RESEND_S)

    def _properties(self, reply_to: str, left_s: float) -> Properties:
        return Properties(
            content_type=self._request.content_type,
            response_topic=reply_to,
            correlation_data=self._name,
            expiry_s=max(1, math.ceil(left_s)),
            utf8=self._request.content_type == JSON,
            user=tuple(("tensor", tensor) for tensor in self._request.tensors),
        )

    def _document(self, reply_to: str, left_s: float) -> bytes:
        envelope = {"reply_to": reply_to, "id": self._name.decode(), "deadline_s": round(left_s, 3)}
        return json.dumps(envelope | self._request.document(self._inputs or {}) | envelope).encode()

    async def _wait_for_inputs(self, end: float) -> None:
        while self._inputs is None and time.monotonic() < end:
            self._told.clear()
            try:
                await asyncio.wait_for(self._told.wait(), end - time.monotonic())
            except TimeoutError:
                break
        if self._inputs is None:
            why = self._presence.away or (
                f"{self._agent} serves no model called {self._model}"
                if self._presence.state
                else f"no agent called {self._agent} is known at the broker"
            )
            raise FleetError(why, hint=AGENTS_HINT)

    def _nothing(self, waited_s: float) -> FleetError:
        state = self._presence.state
        why = f"it is {state}" if state else "no agent of that name is known at the broker"
        return FleetError(f"no answer from {self._agent} within {waited_s:.1f} s: {why}", hint=AGENTS_HINT)


def _inputs(document: dict[str, Any]) -> dict[str, TensorSpec] | None:
    try:
        specs = [
            TensorSpec(tensor["name"], tensor["datatype"], tuple(tensor["shape"]))
            for tensor in document["inputs"]
        ]
    except (KeyError, TypeError, ValueError):
        return None
    return {spec.name: spec for spec in specs}
