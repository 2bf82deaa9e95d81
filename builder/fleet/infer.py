"""Send one request to a model on an agent, again and again until there is an answer or it is too late.

Promises: one answer, or an error that says why there is none. A request is sent again with the same
correlation data, so a broker or an agent that restarts in between costs only time: the agent remembers its
answers and does not run the model twice. Only a request that was refused because the queue is full (503) is
sent again as a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import BundleError, FormatError
from agent.mqtt.message import Message
from agent.wire import topics
from agent.wire.answer import OVERLOADED
from agent.wire.answer_head import OK
from agent.wire.content_types import JSON, RAW
from agent.wire.envelope import Envelope
from agent.wire.model_state import ModelState
from agent.wire.request import InferMessage
from builder.errors import FleetError, PackageError
from builder.fleet.answer import Answer, Output, Prediction, read_answer
from builder.fleet.broker import Broker
from builder.fleet.client import Client
from builder.fleet.presence import ABSENT_LIMIT_S, PresenceWatch, unknown_agent
from builder.fleet.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from agent.mqtt.reason_codes import Reason

# When to send a request again for the first time; the interval grows by half each time.
RESEND_S: Final = 2.0
LONGEST_RESEND_S: Final = 15.0
# The first pause after a 503; it doubles each time. A full queue of a model that takes 100 ms is half empty
# after a few seconds.
OVERLOAD_PAUSE_S: Final = 0.2
# How long to wait for the model's retained state document, which names its inputs.
STATE_LIMIT_S: Final = 2.0
# MQTT 5.0, 3.4.2.1: the broker accepted the message, and there is no subscriber.
NO_SUBSCRIBERS: Final = 0x10
AGENTS_HINT: Final = "list the agents and their models with `edgebundle agents`"


@dataclass(frozen=True, slots=True)
class InferResult:
    """An answer.

    Attributes
    ----------
    agent, model
        The names that the request was for.
    status, message
        200 and an empty message, or the reason: 400 a wrong request, 404 no such model, 408 too late, 415 an
        unsupported content type, 500 the model failed, 503 the queue is full.
    version
        Of the model that answered.
    outputs, top
        Its tensors, and the rows of its top-k list.
    latency_s
        From the first time that the request was sent to the answer.
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
        """Whether the model answered."""
        return self.status == OK


def infer(
    agent: str,
    model: str,
    what: Request | Mapping[str, np.ndarray[Any, Any]] | bytes | str | Path,
    broker: Broker,
    *,
    deadline_s: float = 30.0,
    progress: Callable[[str], None] | None = None,
) -> InferResult:
    """Send a request to a model on an agent, and wait for the answer.

    Parameters
    ----------
    agent, model
        The names of the agent and the model.
    what
        An image's bytes; the path of an image, an `.npz` or a `.json`; arrays by input name; or a request.
    deadline_s
        Seconds until an answer is of no use; the agent does not start to compute after that.
    progress
        Called with one line when the request has to wait because the agent is not online.

    Raises
    ------
    FleetError
        If no answer came in time, or the broker knows no such agent.
    PackageError
        If `what` cannot be made into a request.
    BrokerError
        If the broker cannot be reached, or refuses.
    """
    return asyncio.run(
        infer_async(agent, model, _request(what), broker, deadline_s=deadline_s, progress=progress)
    )


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
    progress: Callable[[str], None] | None = None,
) -> InferResult:
    """Do what `infer` does, in a running event loop."""
    try:
        topic = topics.format_topic(topics.Infer(agent, model))
    except ValueError as error:
        raise FleetError(
            f"expected the names of an agent and a model, got {agent!r:.80} and {model!r:.80}"
        ) from error
    inference = _Inference(agent, model, topic, request, progress or (lambda _line: None))
    async with Client(broker, inference.on_message, on_up=inference.on_up) as client:
        result = await inference.run(client, deadline_s)
    if result is None:
        raise await unknown_agent(agent, broker)
    return result


class _Inference:
    """One request, until it is answered."""

    def __init__(
        self, agent: str, model: str, topic: str, request: Request, progress: Callable[[str], None]
    ) -> None:
        self._agent = agent
        self._model = model
        self._topic = topic
        self._request = request
        self._progress = progress
        self._presence = PresenceWatch(agent)
        self._connects = 0
        self._no_subscriber = False
        self._inputs: tuple[TensorSpec, ...] = ()
        # The access list in docs/mosquitto lets an agent answer only below its own name. The random part
        # keeps the answers to two commands of one user apart, and others cannot guess it.
        self._folder = f"{agent}/{secrets.token_hex(8)}"
        self._reply_filter = ""
        self._id = ""
        self._answer: asyncio.Future[Message] | None = None
        self._inputs_known = asyncio.Event()
        self._reconnected = asyncio.Event()
        self._attempts = 0

    async def run(self, client: Client, deadline_s: float) -> InferResult | None:
        """Send the request until there is an answer; return None if there is no such agent."""
        self._reply_filter = topics.reply_filter(client.reply_name, self._folder)
        await client.subscribe(self._reply_filter, 1)
        self._presence.subscribe(client)
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
        """Take an answer, or a document about the agent or the model."""
        self._presence.on_message(topic, message)
        match topic:
            case topics.ModelState(self._agent, self._model):
                with contextlib.suppress(BundleError):
                    self._inputs = ModelState.from_bytes(message.payload).inputs
                if self._inputs:
                    self._inputs_known.set()
            case topics.Reply(_, suffix) if suffix == f"{self._folder}/{self._id}":
                if self._answer is not None and not self._answer.done():
                    self._answer.set_result(message)

    def on_up(self) -> None:
        """Send the request again at once: what was under way may be lost."""
        self._connects += 1
        self._reconnected.set()

    def _published(self, verdict: asyncio.Future[Reason]) -> None:
        """Record whether any agent has subscribed, which an MQTT 5 broker reports."""
        if not verdict.cancelled() and verdict.exception() is None:
            self._no_subscriber = verdict.result().code == NO_SUBSCRIBERS

    def _absent(self, waited_s: float) -> bool:
        """Return whether the agent has neither subscribed nor published its state since the broker started.

        A broker that restarted may have forgotten an agent that is about to reconnect.
        """
        known = self._presence.state or self._connects > 1
        return self._no_subscriber and not known and waited_s >= ABSENT_LIMIT_S

    async def _ask(self, client: Client, began: float, end: float) -> Answer | None:
        """Send the request under one identifier until its answer arrives; None if there is no such agent."""
        self._id = secrets.token_hex(8)
        self._answer = asyncio.get_running_loop().create_future()
        reply_to = topics.format_topic(topics.Reply(client.reply_name, f"{self._folder}/{self._id}"))
        message: InferMessage | None = None
        resend_s = RESEND_S
        while True:
            waited_s, left_s = time.monotonic() - began, end - time.monotonic()
            if self._absent(waited_s):
                return None
            if left_s <= 0:
                raise self._no_answer(waited_s)
            if self._attempts == 1 and self._presence.away:
                self._progress(f"{self._presence.away}; waiting for up to {left_s:.0f} s")
            self._attempts += 1
            self._reconnected.clear()
            if client.speaks_5:
                message = self._with_properties(reply_to, left_s)
                verdict = client.publish(self._topic, message.body, properties=message.properties())
                verdict.add_done_callback(self._published)
            else:
                # The same bytes each time, by which the agent recognises a repeated request.
                message = message or self._with_envelope(reply_to, left_s)
                client.publish(self._topic, message.body)
            woken: asyncio.Future[Any] = asyncio.ensure_future(self._reconnected.wait())
            either: set[asyncio.Future[Any]] = {self._answer, woken}
            try:
                await asyncio.wait(either, timeout=min(resend_s, left_s), return_when=asyncio.FIRST_COMPLETED)
            finally:
                woken.cancel()
            if self._answer.done():
                return read_answer(self._answer.result())
            resend_s = min(1.5 * resend_s, LONGEST_RESEND_S)

    def _with_properties(self, reply_to: str, left_s: float) -> InferMessage:
        return InferMessage(
            reply_to=reply_to,
            body=self._request.body,
            content_type=self._request.content_type,
            tensors=self._request.tensors,
            correlation=self._id.encode(),
            deadline_s=left_s,
        )

    def _with_envelope(self, reply_to: str, left_s: float) -> InferMessage:
        envelope = Envelope(reply_to, self._id, round(left_s, 3))
        try:
            return InferMessage.with_envelope(envelope, self._request.to_json(self._inputs))
        except FormatError as error:
            raise PackageError(str(error)) from error

    async def _wait_for_inputs(self, end: float) -> None:
        """Wait for the model's inputs: without MQTT 5 the JSON names the input that an image is for."""
        try:
            await asyncio.wait_for(self._inputs_known.wait(), max(end - time.monotonic(), 0.0))
        except TimeoutError as error:
            why = self._presence.away or (
                f"{self._agent} serves no model called {self._model}"
                if self._presence.state
                else f"no agent called {self._agent} is known at the broker"
            )
            raise FleetError(why, hint=AGENTS_HINT) from error

    def _no_answer(self, waited_s: float) -> FleetError:
        state = self._presence.said
        why = f"it is {state}" if state else "no agent of that name is known at the broker"
        hint = AGENTS_HINT
        if self._presence.online:
            # MQTT has no error for an answer that the access list withholds.
            readable = self._reply_filter.rpartition(f"/{self._folder}")[0]
            hint = f"check that the broker's access list lets this user read {readable}/#"
        return FleetError(f"no answer from {self._agent} within {waited_s:.1f} s: {why}", hint=hint)
