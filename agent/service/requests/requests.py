"""An inference request as the main process handles it, between its message and its answer.

Promises: no I/O, and no copy of the payload. Leaves reading and writing messages to `agent.wire`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.service.requests.answers import ReplyTo, RequestKey
from agent.wire.answer import AnswerHead, FinalAnswer
from agent.wire.request import InferMessage

# A 408 says that it is too late, and is itself worth delivering for this long.
_LATE_EXPIRY_S: Final = 5
# One day: neither timers nor memory are made for longer promises.
MAX_DEADLINE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request without its payload.

    Attributes
    ----------
    model
        The model's name, from the topic.
    reply
        Where the answer goes, and until when.
    id
        The requester's name for the request, from the JSON envelope, or None.
    content_type, tensors, accept
        Content type and raw tensors of the payload, and the content type that the answer should have.
    received_s
        When it arrived (`time.monotonic`).
    client_json
        The requester has no user properties: status and message belong in the answer's JSON.
    key
        Equal for repeated deliveries of one request; None if nothing tells two requests apart.
    """

    model: str
    reply: ReplyTo
    id: str | None
    content_type: str
    tensors: tuple[str, ...]
    accept: str | None
    received_s: float
    client_json: bool
    key: RequestKey | None

    @property
    def head(self) -> AnswerHead:
        """The head of a refusal's JSON."""
        return AnswerHead(self.model, id=self.id, has_envelope=self.client_json)


def read_request(message: Message, model: str, now_s: float, default_deadline_s: float) -> InferRequest:
    """Read a request from a message.

    Parameters
    ----------
    message
        One that arrived on an `infer` topic.
    model
        The model's name, from the topic.
    now_s
        When it arrived (`time.monotonic`).
    default_deadline_s
        For requests without Message Expiry and `deadline_s`.

    Raises
    ------
    UnanswerableError
        If it names no topic for an answer, or one outside the replies.
    """
    request = InferMessage.from_message(message)
    deadline_s = default_deadline_s if request.deadline_s is None else request.deadline_s
    correlation = request.correlation
    return InferRequest(
        model=model,
        reply=ReplyTo(
            topic=request.reply_to,
            correlation=correlation,
            qos=message.qos,
            deadline_s=now_s + min(deadline_s, MAX_DEADLINE_S),
            trace=request.trace,
        ),
        id=request.id,
        content_type=request.content_type,
        tensors=request.tensors,
        accept=request.accept,
        received_s=now_s,
        client_json=request.has_envelope,
        key=None
        if correlation is None
        else RequestKey.of(message.topic, request.reply_to, correlation, message.payload),
    )


def answer_properties(reply: ReplyTo, answer: FinalAnswer, now_s: float) -> Properties:
    """Return the MQTT 5 properties of an answer's message."""
    expiry_s = max(_LATE_EXPIRY_S, round(reply.deadline_s - now_s))
    return answer.properties(correlation=reply.correlation, expiry_s=expiry_s, trace=reply.trace)
