"""From a request that came over MQTT to its answer, and to its acknowledgement.

Promises: every request that can be answered is answered; requests are answered in the order in which they
finish and acknowledged in the order in which they came, each only when the broker has its answer; one
that comes again gets the answer it got. Nothing from the network reaches a log without bounds.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.errors import DeadlineError, OverloadedError, RequestError, UnanswerableError, UnknownModelError
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message, Receipt
from agent.mqtt.reason_codes import CLOSED, Reason
from agent.service.metrics.metrics import UNKNOWN_MODEL, Metrics
from agent.service.models.models import Models
from agent.service.requests.acknowledgement import AckOrder, Slot
from agent.service.requests.answers import AnswerRecord, AnswerStore, ReplyTo, RequestKey
from agent.service.requests.requests import InferRequest, answer_properties, read_request
from agent.service.work import Outcome
from agent.sparing_log import SparingLog
from agent.wire.answer import FinalAnswer, refusal
from agent.wire.topics import GroupInfer, Infer, parse_topic

_log = logging.getLogger(__name__)

# What goes wrong because of what others send is logged at most so often a kind; the counters have all of it.
_LOG_INTERVAL_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Exchange:
    """A request on its way to its answer, and every delivery of it that waits for an acknowledgement."""

    key: RequestKey | None
    reply: ReplyTo
    slots: list[Slot]


class Inference:
    """Answers requests.

    Parameters
    ----------
    device
        Our name in topics.
    models
        What runs here.
    answers
        What was answered before.
    metrics
        What is counted.
    default_deadline_s
        For requests without Message Expiry.
    """

    def __init__(
        self, device: str, models: Models, answers: AnswerStore, metrics: Metrics, default_deadline_s: float
    ) -> None:
        self._device = device
        self._models = models
        self._answers = answers
        self._metrics = metrics
        self._default_deadline_s = default_deadline_s
        self._connection: Connection | None = None
        self._acks = AckOrder(self._ack)
        self._running: dict[bytes, _Exchange] = {}
        self._in_flight = 0
        self._closed = False
        self._sparing_log = SparingLog(_log, _LOG_INTERVAL_S)

    @property
    def in_flight(self) -> int:
        """How many requests are accepted and their answers not out."""
        return self._in_flight

    def use(self, connection: Connection) -> None:
        """Answer over this connection; its messages are to be given to `on_message`."""
        self._connection = connection

    def deliver_left_over(self) -> None:
        """Publish the answers that an earlier process computed and could not deliver."""
        for record in self._answers.undelivered():
            exchange = _Exchange(record.key, record.reply, [])
            self._running[record.key.digest] = exchange
            self._in_flight += 1
            self._send(exchange, record.answer)

    def refuse_new(self) -> None:
        """Take nothing more: what comes from now on stays unacknowledged, and with the broker."""
        self._closed = True

    def on_down(self, _why: Reason) -> None:
        """Forget the order of acknowledgement: the broker delivers again what it kept."""
        self._acks.forget()

    def on_message(self, message: Message) -> None:
        """Take a request."""
        if self._closed:
            return
        slot = self._acks.arrived(message)
        try:
            self._take(message, slot)
        except Exception:  # noqa: BLE001 - the outermost loop of a request: one must not hold up all others
            _log.exception("a fault of ours while taking a request")
            self._metrics.count("edge_faults_total")
            if slot is not None:
                slot.finish()

    def _take(self, message: Message, slot: Slot | None) -> None:
        slots = [] if slot is None else [slot]
        topic = parse_topic(message.topic)
        if not isinstance(topic, Infer | GroupInfer):
            for taken in slots:  # some brokers send what nobody subscribed to
                taken.finish()
            return
        if message.retain:
            # It would be computed again at each of our connects, for somebody who is long gone.
            self._unanswerable(slots, UnanswerableError("retained", f"retained on {message.topic[:200]!r}"))
            return
        try:
            request = read_request(message, topic.model, time.monotonic(), self._default_deadline_s)
        except UnanswerableError as error:
            self._unanswerable(slots, error)
            return
        key = request.key
        exchange = _Exchange(key, request.reply, slots)
        if key is not None:
            running = self._running.get(key.digest)
            if running is not None:
                self._metrics.count("edge_inference_duplicates_total")
                running.slots += slots
                return
            known = self._answers.get(key)
            self._running[key.digest] = exchange
            if known is not None:
                self._metrics.count("edge_inference_duplicates_total")
                self._in_flight += 1
                self._send(exchange, known)
                return
        self._in_flight += 1
        try:
            self._submit(exchange, request, topic, message.payload)
        except RequestError as error:
            self._finish(exchange, request.model, refusal(error, request.head), cheap=True)

    def _submit(
        self, exchange: _Exchange, request: InferRequest, topic: Infer | GroupInfer, payload: bytes
    ) -> None:
        model = self._models.get(request.model)
        if model is None:
            if isinstance(topic, GroupInfer):
                # Ours to serve a moment ago; another member may still be able to.
                raise OverloadedError(
                    f"{request.model} does not run on this member of {topic.group} any more"
                )
            raise UnknownModelError(f"no model {request.model!r} runs on {self._device}")
        if request.reply.deadline_s <= request.received_s:
            raise DeadlineError("the deadline passed before the request came")
        model.submit(request, payload, functools.partial(self._computed, exchange, request))

    def _computed(self, exchange: _Exchange, request: InferRequest, outcome: Outcome) -> None:
        if outcome.answer is None:
            assert outcome.error is not None
            cheap = isinstance(outcome.error, OverloadedError)
            self._finish(exchange, request.model, refusal(outcome.error, request.head), cheap=cheap)
            return
        answer = outcome.answer
        final = FinalAnswer(
            status=answer.status,
            message=answer.message,
            content_type=answer.content_type,
            payload=bytes(outcome.payload),
            model_version=outcome.version,
            tensors=answer.tensors,
        )
        self._finish(exchange, request.model, final, cheap=False)
        # Behind the answer: what is counted nobody waits for.
        self._metrics.durations(request.model, answer, time.monotonic() - request.received_s)

    def _finish(self, exchange: _Exchange, model: str, answer: FinalAnswer, *, cheap: bool) -> None:
        if exchange.key is not None:
            self._answers.put(AnswerRecord(exchange.key, exchange.reply, answer), cheap=cheap)
        self._send(exchange, answer)
        known = self._models.get(model) is not None
        self._metrics.request(model if known else UNKNOWN_MODEL, answer.status)

    def _send(self, exchange: _Exchange, answer: FinalAnswer) -> None:
        assert self._connection is not None
        reply = exchange.reply
        self._connection.send(
            reply.topic,
            answer.payload,
            functools.partial(self._sent, exchange),
            qos=reply.qos,
            properties=answer_properties(reply, answer, time.monotonic()),
        )

    def _sent(self, exchange: _Exchange, verdict: Reason) -> None:
        self._in_flight -= 1
        if exchange.key is not None:
            self._running.pop(exchange.key.digest, None)
        if verdict is CLOSED:
            return  # not acknowledged: it comes again when we do
        if exchange.key is not None:
            self._answers.delivered(exchange.key)
        if verdict.failed:
            self._metrics.count("edge_answers_undelivered_total", reason=verdict.name)
            self._log_sparingly(verdict.name, lambda: f"an answer could not be delivered: {verdict}")
        for slot in exchange.slots:
            slot.finish()

    def _unanswerable(self, slots: list[Slot], error: UnanswerableError) -> None:
        self._metrics.count("edge_inference_unanswerable_total", reason=error.reason)
        self._log_sparingly(error.reason, lambda: f"a request was dropped: {error}")
        for slot in slots:
            slot.finish()

    def _ack(self, receipt: Receipt) -> None:
        assert self._connection is not None
        self._connection.ack(receipt)

    def _log_sparingly(self, kind: str, text: Callable[[], str]) -> None:
        if self._sparing_log.due(kind):
            _log.warning("%s", ascii(text())[1:-1][:400])
