"""Answers requests that arrive over MQTT, and acknowledges them.

Promises: every request that can be answered is answered; requests are answered in the order in which they
finish and acknowledged in the order in which they arrived, each only when the broker has its answer; a
request that is delivered again gets the answer that it got before; bad requests cannot flood the log; while
the broker does not take the answers, no more are computed.

The docstring of `agent.service.requests` shows the whole way of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from functools import partial
from typing import Final

from agent.bundle.machine import Machine
from agent.errors import (
    DeadlineError,
    ExecutionError,
    OverloadedError,
    RequestError,
    UnanswerableError,
    UnknownModelError,
)
from agent.mqtt.connection import Connection
from agent.mqtt.message import Message, Receipt
from agent.mqtt.properties import Properties
from agent.mqtt.reason_codes import CLOSED, POISON, TOO_LARGE, UNSENDABLE, Reason
from agent.rate_limited_log import RateLimitedLog
from agent.service.metrics.metrics import UNKNOWN_MODEL, Metrics
from agent.service.models.model import Model
from agent.service.models.models import Models
from agent.service.requests.acknowledgement import AckOrder, Slot
from agent.service.requests.answers import AnswerRecord, AnswerStore, ReplyTo, RequestKey
from agent.service.requests.payload_digest import SLICE_BYTES, PayloadDigests
from agent.service.requests.pending import Deadlines, Ends, Pending
from agent.wire.answer import FinalAnswer, refusal
from agent.wire.answer_head import OK, AnswerHead
from agent.wire.content_types import JSON, RAW
from agent.wire.server_timing import ServerTiming
from agent.wire.topics import ANONYMOUS, GroupInfer, Infer, asking_user, parse_topic
from agent.worker.frames import Answer

_log = logging.getLogger(__name__)

# Faults of others are logged at most this often for each kind; the metrics count all of them.
_LOG_INTERVAL_S: Final = 10.0
_MAX_LOG_CHARACTERS: Final = 400
# An answer that is published at its deadline, such as a 408, is still worth delivering for this long.
_LATE_EXPIRY_S: Final = 5
# Answers that wait for the broker: above the first, nothing more is computed until it has taken so many that
# no more than the second are left. Each is in memory twice.
_MAX_BACKLOG_BYTES: Final = 4 << 20
_RESUME_BACKLOG_BYTES: Final = 2 << 20
_BACKLOG_LOOK_S: Final = 0.05
# Payloads of one client in all models: one of the largest is computed, another one waits. Each is in memory
# again in the worker that has it.
_MAX_HELD_BYTES: Final = 128 << 20
# Those of all clients take at most this share of the memory: workers, models and the system need the rest.
_MEMORY_SHARE: Final = 4
_NO_DIGEST: Final = b"-"
# A second of requests that find room, or that cannot be answered, is no burst.
_SHED_ALL_S: Final = 1.0
# The broker does not accept this answer, but perhaps a smaller one with other content. In numbers: malformed
# packet, protocol error, packet too large, payload format invalid.
_NOT_THIS_ANSWER: Final = frozenset({TOO_LARGE.code, POISON.code, UNSENDABLE.code, 0x81, 0x82, 0x95, 0x99})


class Inference:
    """Answers requests to a device.

    `answers` were given before. A large request is refused if `max_held_bytes` of payloads would be exceeded
    with it. `taken_for_groups` counts messages to groups.
    """

    def __init__(
        self,
        device: str,
        models: Models,
        answers: AnswerStore,
        metrics: Metrics,
        deadlines: Deadlines,
        max_held_bytes: int = _MAX_HELD_BYTES,
    ) -> None:
        self._max_held_bytes = max_held_bytes
        self._device = device
        self._models = models
        self._answers = answers
        self._metrics = metrics
        self._deadlines = deadlines
        self._ends = Ends(self._answered, self._refused)
        self._connection: Connection | None = None
        self._group_connection: Connection | None = None
        self._acks = AckOrder(self._ack)
        self._group_acks = AckOrder(self._ack_group)
        self.taken_for_groups = 0
        # Requests that are not settled, by the digest of their key, with the deliveries to acknowledge.
        self._running: dict[bytes, list[Slot]] = {}
        self._numbers = itertools.count(1)
        self._in_flight = 0
        self._holding = False
        self._settling = asyncio.Event()
        self._closed = False
        self._digests = PayloadDigests()
        self._taking: set[asyncio.Task[None]] = set()
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)

    @property
    def in_flight(self) -> int:
        """How many requests are accepted and not settled."""
        return self._in_flight

    def use(self, connection: Connection) -> None:
        """Answer over this connection; its messages must be given to `on_message`."""
        self._connection = connection

    def use_for_groups(self, connection: Connection) -> None:
        """Take the requests of groups from this connection; they are answered over the other one.

        Its messages must be given to `on_group_message`. The broker gives these requests to no
        other member, so each one is answered, with 503 if it cannot be served now.
        """
        self._group_connection = connection

    def deliver_left_over(self) -> None:
        """Publish the answers that an earlier process computed and could not deliver."""
        for record in self._answers.undelivered():
            slots = self._running[record.key.digest] = []
            self._in_flight += 1
            self._publish(record.reply, record.key, slots, record.answer)

    def refuse_new(self) -> None:
        """Accept no more requests: from now on they stay with the broker, unacknowledged.

        Those of groups are answered with 503.
        """
        self._closed = True

    async def drain(self, limit_s: float) -> None:
        """Return when every accepted request is settled, the connection is lost, or `limit_s` is over."""
        assert self._connection is not None
        if self._in_flight and self._connection.connected:
            self._settling.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._settling.wait()

    def on_down(self, _why: Reason) -> None:
        """Forget the order of acknowledgement: the broker delivers again what was not acknowledged."""
        self._acks.forget()
        self._settling.set()

    def on_group_down(self, _why: Reason) -> None:
        """Forget the order of acknowledgement on the connection of the groups."""
        self._group_acks.forget()

    def on_message(self, message: Message) -> None:
        """Accept, answer or drop the request in a message."""
        if not self._closed:
            self._arrived(message, self._acks)

    def on_group_message(self, message: Message) -> None:
        """Do the same with a message to a group."""
        self.taken_for_groups += 1
        self._arrived(message, self._group_acks)

    def sheds(self, topic_text: str, flooded_s: float) -> bool:
        """Return whether to drop a request at QoS 0 unread, while more arrives than can be read.

        Those are dropped that would be refused, whatever they say. If that is not enough, all are.
        """
        if flooded_s >= _SHED_ALL_S:
            return True
        topic = parse_topic(topic_text)
        if not isinstance(topic, Infer | GroupInfer):
            return True
        model = self._model_of(topic)
        return model is None or model.full

    def _arrived(self, message: Message, acks: AckOrder) -> None:
        slot = acks.arrived(message)
        nbytes = len(message.payload)
        if nbytes <= SLICE_BYTES:
            self._take_safely(message, slot)
            return
        if not self._digests.has_room(nbytes) or self._holds_much(message):
            self._take_safely(message, slot, is_over=True)
            return
        taking = asyncio.get_running_loop().create_task(self._take_large(message, slot, acks))
        self._taking.add(taking)
        taking.add_done_callback(self._taking.discard)

    def _holds_much(self, message: Message) -> bool:
        """Return whether who sent a large request, or all clients, have too much in all models."""
        topic, nbytes = parse_topic(message.topic), len(message.payload)
        client = (isinstance(topic, Infer | GroupInfer) and topic.user) or ANONYMOUS
        held = sum(model.nbytes_of(client) for model in self._models)
        whole = self._digests.waiting_bytes + sum(model.nbytes for model in self._models)
        return (held > 0 and held + nbytes > _MAX_HELD_BYTES) or (
            whole > 0 and whole + nbytes > self._max_held_bytes
        )

    async def _take_large(self, message: Message, slot: Slot | None, acks: AckOrder) -> None:
        digest = await self._digests.of(message.payload)
        # Once no more are accepted, it stays with the broker; a group's request is answered with 503.
        if not self._closed or acks is self._group_acks:
            self._take_safely(message, slot, digest)

    def _take_safely(
        self,
        message: Message,
        slot: Slot | None,
        payload_digest: bytes | None = None,
        *,
        is_over: bool = False,
    ) -> None:
        try:
            self._take(message, [] if slot is None else [slot], payload_digest, is_over=is_over)
        except Exception:  # noqa: BLE001 - the outermost loop of a request: one must not hold up all others
            _log.exception("internal error while taking a request")
            self._metrics.count("edge_faults_total")
            if slot is not None:
                slot.finish()

    def _take(
        self, message: Message, slots: list[Slot], payload_digest: bytes | None, *, is_over: bool
    ) -> None:
        """Answer, drop or submit a request; one that `is_over` finds too many large ones before it."""
        topic = parse_topic(message.topic)
        if topic is not None and not isinstance(topic, Infer | GroupInfer):
            # Some brokers send messages without a subscription to them.
            self._drop(
                slots,
                UnanswerableError(
                    "foreign_topic", f"expected the topic of a request, got {message.topic!r:.200}"
                ),
            )
            return
        if message.retain:
            # It would be computed again at each connect, although the requester is long gone.
            self._drop(slots, UnanswerableError("retained", f"retained on {message.topic[:200]!r}"))
            return
        try:
            pending = Pending.read(
                message,
                # The filter also matches names that no model can have.
                "" if topic is None else topic.model,
                asking_user(message.topic) if topic is None else topic.user or None,
                self._ends,
                seq=next(self._numbers),
                now_s=_now_s(),
                deadlines=self._deadlines,
                payload_digest=_NO_DIGEST if is_over else payload_digest,
            )
        except UnanswerableError as error:
            self._drop(slots, error)
            return
        pending.slots = slots
        if is_over:
            # Without the digest of its payload nothing tells it from others, so its answer is not remembered.
            pending.key = None
            pending.error = pending.error or OverloadedError(
                "too many large requests wait on this device", hint="ask again later"
            )
        if pending.error is not None:
            self._in_flight += 1
            self._finish(pending, refusal(pending.error, pending.head), cheap=True)
            return
        key = pending.key
        if key is not None:
            running = self._running.get(key.digest)
            if running is not None:
                self._metrics.count("edge_inference_duplicates_total")
                running += slots  # acknowledged when the first delivery is answered
                return
            self._running[key.digest] = slots
        self._in_flight += 1
        # From here on the request ends in `_settled`, whatever happens.
        try:
            known = None if key is None else self._answers.get(key)
            if known is None:
                self._submit(pending, topic)
            else:
                self._metrics.count("edge_inference_duplicates_total")
                self._publish(pending.reply, key, slots, known)
        except RequestError as error:
            self._finish(pending, refusal(error, pending.head), cheap=True)
        except Exception:  # noqa: BLE001 - the outermost loop of a request: it must not be left unanswered
            _log.exception("internal error while serving a request")
            self._metrics.count("edge_faults_total")
            pending.refuse(ExecutionError(f"{pending.model}: internal error of the agent"))

    def _submit(self, pending: Pending, topic: Infer | GroupInfer | None) -> None:
        model = None if topic is None else self._model_of(topic)
        if isinstance(topic, GroupInfer) and (self._closed or model is None or not model.ready):
            # The broker dealt it to us a moment before we left; another member may be able to answer.
            raise OverloadedError(
                f"{pending.model} cannot be served by this member of {topic.group} now", hint="ask again"
            )
        if model is None:
            raise UnknownModelError(
                f"no model {pending.model!r} runs on {self._device}"
                if topic is not None
                else "expected the name of a model in the topic, got another name"
            )
        if pending.reply.deadline_s <= pending.frame.received_s:
            raise DeadlineError("the deadline passed before the request arrived")
        model.submit(pending)

    def _model_of(self, topic: Infer | GroupInfer) -> Model | None:
        model = self._models.get(topic.model)
        if model is None and isinstance(topic, Infer):
            model = self._models.awaited.get(topic.model)
        return model

    def _answered(self, pending: Pending, answer: Answer, payload: bytes, version: str) -> None:
        """Publish what a worker computed."""
        final = FinalAnswer(
            status=answer.status,
            message=answer.message,
            content_type=answer.content_type,
            payload=payload,
            model_version=version,
            tensors=answer.tensors,
            server_timing=str(
                ServerTiming(answer.queue_us, answer.decode_us, answer.compute_us, answer.encode_us)
            ),
            session_step=answer.step,
        )
        self._finish(pending, final, cheap=False)
        # After the answer is sent, so that metrics never delay it.
        self._metrics.durations(pending.model, answer, _now_s() - pending.frame.received_s)

    def _refused(self, pending: Pending, error: RequestError) -> None:
        """Publish why an accepted request was not computed."""
        self._finish(pending, refusal(error, pending.head), cheap=isinstance(error, OverloadedError))

    def _finish(self, pending: Pending, answer: FinalAnswer, *, cheap: bool) -> None:
        """Remember an answer, publish and count it."""
        properties = None
        try:
            properties = self._properties(pending.reply, answer)
            if not self._fits(pending.reply, answer, properties):
                self._complain(TOO_LARGE, answer)
                answer = refusal(self._undeliverable(answer, TOO_LARGE), pending.head)
                properties = self._properties(pending.reply, answer)
            if pending.key is not None:
                self._answers.put(
                    AnswerRecord(pending.key, pending.reply, answer, pending.client), cheap=cheap
                )
        except Exception:  # noqa: BLE001 - the outermost loop of an answer: it must not hold up all others
            _log.exception("internal error while an answer is prepared")
            self._metrics.count("edge_faults_total")
        self._publish(pending.reply, pending.key, pending.slots, answer, properties)
        known = self._models.get(pending.model) is not None
        self._metrics.request(pending.model if known else UNKNOWN_MODEL, answer.status)

    def _publish(
        self,
        reply: ReplyTo,
        key: RequestKey | None,
        slots: list[Slot],
        answer: FinalAnswer,
        properties: Properties | None = None,
    ) -> None:
        assert self._connection is not None
        settled = partial(self._settled, reply, key, slots, answer)
        try:
            self._connection.send(
                reply.topic,
                answer.payload,
                settled,
                qos=reply.qos,
                properties=properties or self._properties(reply, answer),
            )
        except ValueError as error:  # what a worker or an earlier process wrote
            _log.error("an answer cannot be sent: %s", error)
            settled(UNSENDABLE)
        except Exception:  # noqa: BLE001 - the outermost loop of an answer: it must not hold up all others
            _log.exception("internal error while sending an answer")
            self._metrics.count("edge_faults_total")
            settled(UNSENDABLE)
        if not self._holding and self._connection.backlog_bytes > _MAX_BACKLOG_BYTES:
            self._holding = True
            self._models.hold(held=True)
            asyncio.get_running_loop().call_later(_BACKLOG_LOOK_S, self._look_at_backlog)

    def _look_at_backlog(self) -> None:
        """Compute again when the broker has taken enough of what waited for it."""
        assert self._connection is not None
        if self._connection.backlog_bytes > _RESUME_BACKLOG_BYTES:
            asyncio.get_running_loop().call_later(_BACKLOG_LOOK_S, self._look_at_backlog)
        else:
            self._holding = False
            self._models.hold(held=False)

    def _properties(self, reply: ReplyTo, answer: FinalAnswer) -> Properties:
        return answer.properties(
            correlation=reply.correlation,
            expiry_s=max(_LATE_EXPIRY_S, round(reply.deadline_s - _now_s())),
            trace=reply.trace,
        )

    def _fits(self, reply: ReplyTo, answer: FinalAnswer, properties: Properties) -> bool:
        """Return whether the broker accepts an answer of this size; a refusal is sent in any case."""
        assert self._connection is not None
        return answer.status != OK or self._connection.fits(
            reply.topic, answer.payload, qos=reply.qos, properties=properties
        )

    def _undeliverable(self, answer: FinalAnswer, verdict: Reason) -> ExecutionError:
        """Return the error that replaces an answer that the broker does not accept."""
        assert self._connection is not None
        if verdict is not TOO_LARGE:
            return ExecutionError(
                f"the broker does not accept the answer of {len(answer.payload)} bytes: {verdict}"
            )
        return ExecutionError(
            f"expected an answer in a packet of at most {self._connection.limits.max_packet_bytes} bytes, "
            f"which is the broker's limit, got an answer of {len(answer.payload)} bytes",
            hint=f"ask for raw tensors with the user property accept={RAW}, or raise the broker's limit"
            if answer.content_type == JSON
            else "raise the broker's limit for packets",
        )

    def _complain(self, verdict: Reason, answer: FinalAnswer) -> None:
        self._metrics.count("edge_answers_undelivered_total", reason=verdict.name)
        self._warn(verdict.name, f"an answer of {len(answer.payload)} bytes is not delivered: {verdict}")

    def _settled(
        self,
        reply: ReplyTo,
        key: RequestKey | None,
        slots: list[Slot],
        answer: FinalAnswer,
        verdict: Reason,
    ) -> None:
        """Acknowledge a request whose answer the broker has taken or refused, unless it gets another one."""
        if verdict.code in _NOT_THIS_ANSWER and answer.status == OK:
            self._complain(verdict, answer)
            error = self._undeliverable(answer, verdict)
            self._publish(reply, key, slots, refusal(error, _head_of(reply)))
            return
        self._in_flight -= 1
        if not self._in_flight:
            self._settling.set()
        if key is not None:
            self._running.pop(key.digest, None)
        if verdict is CLOSED:
            return  # not acknowledged: the broker delivers it to our next connection
        if key is not None:
            self._answers.delivered(key)
        if verdict.failed:
            self._metrics.count("edge_answers_undelivered_total", reason=verdict.name)
            self._warn(verdict.name, f"an answer could not be delivered: {verdict}")
        for slot in slots:
            slot.finish()

    def _drop(self, slots: list[Slot], error: UnanswerableError) -> None:
        """Acknowledge a request that cannot be answered."""
        self._metrics.count("edge_inference_unanswerable_total", reason=error.reason)
        self._warn(error.reason, f"a request was dropped: {error}")
        for slot in slots:
            slot.finish()

    def _ack(self, receipt: Receipt) -> None:
        assert self._connection is not None
        self._connection.ack(receipt)

    def _ack_group(self, receipt: Receipt) -> None:
        assert self._group_connection is not None
        self._group_connection.ack(receipt)

    def _warn(self, kind: str, text: str) -> None:
        if self._rate_limited_log.due(kind):
            _log.warning("%s", ascii(text)[1:-1][:_MAX_LOG_CHARACTERS])


def most_held_bytes(machine: Machine) -> int:
    """Return how many bytes the payloads of all clients may have on this machine."""
    limits = [size for size in (machine.memory_bytes, machine.memory_limit_bytes) if size is not None]
    return max(_MAX_HELD_BYTES, min(limits, default=0) // _MEMORY_SHARE)


def _head_of(reply: ReplyTo) -> AnswerHead:
    """Return the head of a refusal when only the address of the requester is left.

    It has the members of an envelope: a requester with MQTT 5 ignores them, and one without needs them.
    """
    identifier = None if reply.correlation is None else reply.correlation.decode("utf-8", "replace")
    return AnswerHead("", id=identifier, has_envelope=True)


def _now_s() -> float:
    # On Linux time.monotonic, with which `received_s` and `deadline_s` are compared in the worker.
    return asyncio.get_running_loop().time()
