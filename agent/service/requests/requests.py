"""From a message to an inference request, and from an answer back to a message.

Promises: bytes and values in, values out, no I/O. An answer goes to the requester's own reply space or
nowhere: whoever could name any topic could make the agent write wherever its own credentials allow.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from agent.errors import InputError, RequestError, UnanswerableError
from agent.mqtt.message import Message
from agent.mqtt.properties import MAX_STRING_BYTES, Properties
from agent.service.requests.answers import FinalAnswer, ReplyTo, RequestKey
from agent.service.requests.envelope import read_envelope
from agent.wire.topics import Reply, parse_topic

JSON: Final = "application/json"
STATUS: Final = "__stat"
STATUS_MESSAGE: Final = "__stMsg"
TENSOR: Final = "tensor"
ACCEPT: Final = "accept"
MODEL_VERSION: Final = "model_version"
# W3C Trace Context: MQTT; passed through, for whoever traces.
_TRACE: Final = ("traceparent", "tracestate")

# What __stMsg may take of an answer's properties.
MAX_STATUS_MESSAGE_CHARACTERS: Final = 500
# An answer that says "too late" is itself allowed this long on its way.
_LATE_EXPIRY_S: Final = 5
# A day: timers and memory are not for longer promises.
MAX_DEADLINE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request, as far as the main process reads it, without its payload.

    Attributes
    ----------
    model
        Which one.
    reply
        Where the answer goes, and until when.
    id
        The requester's name for it, in JSON.
    content_type, tensors, accept
        What the payload is, and what the answer should be.
    received_s
        When it came (`time.monotonic`).
    client_json
        The requester has no user properties: status and message stand in the JSON.
    key
        What makes it the same as another, or None where nothing tells two requests apart.
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


def read_request(message: Message, model: str, now_s: float, default_deadline_s: float) -> InferRequest:
    """Read a request from a message.

    Parameters
    ----------
    message
        As it came.
    model
        Which its topic names.
    now_s
        When it came (`time.monotonic`).
    default_deadline_s
        For requests without Message Expiry.

    Raises
    ------
    UnanswerableError
        If there is no place to answer to.
    """
    properties = message.properties
    reply_to = properties.response_topic
    correlation = properties.correlation_data
    identifier: str | None = None
    limit_s = default_deadline_s if properties.expiry_s is None else float(properties.expiry_s)
    client_json = False
    if reply_to is None:
        if properties.content_type not in (None, JSON):
            raise UnanswerableError(
                "no_response_topic", f"no Response Topic beside {properties.content_type!r}"
            )
        try:
            envelope = read_envelope(message.payload)
        except InputError as error:
            raise UnanswerableError(
                "no_response_topic", f"no Response Topic, and in the payload: {error}"
            ) from error
        if envelope.reply_to is None:
            raise UnanswerableError(
                "no_response_topic", "neither a Response Topic nor reply_to in the payload"
            )
        reply_to, identifier = envelope.reply_to, envelope.id
        correlation = identifier.encode() if correlation is None and identifier is not None else correlation
        limit_s = envelope.deadline_s or limit_s
        client_json = True
    if not isinstance(parse_topic(reply_to), Reply):
        raise UnanswerableError("foreign_response_topic", f"an answer to {reply_to[:200]!r} was asked for")
    return InferRequest(
        model=model,
        reply=ReplyTo(
            topic=reply_to,
            correlation=correlation,
            qos=message.qos,
            deadline_s=now_s + min(limit_s, MAX_DEADLINE_S),
            trace=tuple((name, value) for name, value in properties.user if name in _TRACE),
        ),
        id=identifier,
        content_type=properties.content_type or JSON,
        tensors=properties.all(TENSOR),
        accept=properties.first(ACCEPT),
        received_s=now_s,
        client_json=client_json,
        key=None
        if correlation is None
        else RequestKey.of(message.topic, reply_to, correlation, message.payload),
    )


def refusal(request: InferRequest, error: RequestError) -> FinalAnswer:
    """Write the answer of a request that was not, or could not be, computed."""
    message = _one_line(str(error))
    body: dict[str, object] = {"error": message}
    if error.hint is not None:
        body["hint"] = error.hint
    if request.client_json:
        body = {
            "id": request.id,
            "model_name": request.model,
            "status": error.status,
            "message": message,
            **body,
        }
    return FinalAnswer(error.status, message, JSON, json.dumps(body).encode())


def answer_properties(reply: ReplyTo, answer: FinalAnswer, now_s: float) -> Properties:
    """Write what travels beside an answer."""
    user = [(STATUS, str(answer.status))]
    if answer.message:
        user.append((STATUS_MESSAGE, _one_line(answer.message)))
    left_s = reply.deadline_s - now_s
    return Properties(
        content_type=answer.content_type or None,
        correlation_data=reply.correlation,
        expiry_s=max(_LATE_EXPIRY_S, round(left_s)),
        utf8=answer.content_type == JSON,
        user=(*user, *answer.user, *reply.trace),
    )


def _one_line(text: str) -> str:
    """Make a text fit for a user property and a log: printable, one line, bounded."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    assert MAX_STATUS_MESSAGE_CHARACTERS * 4 < MAX_STRING_BYTES
    return shown[:MAX_STATUS_MESSAGE_CHARACTERS]
