"""An inference request: a message at `.../infer`, with MQTT 5 properties or, without them, a JSON envelope.

Promises: an answer is only ever sent below `edge/v1/replies/`, and to a user whom the broker vouches for only
below `edge/v1/replies/<user>/`. A requester that could name any topic could make the agent write wherever the
agent's own credentials allow, or in another's name. Every string that a requester sets is bounded
here, before it is stored, echoed or sent to a worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from agent.errors import InputError, MediaTypeError, RequestError, UnanswerableError
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire.content_types import JSON
from agent.wire.envelope import Envelope, read_envelope, write_envelope
from agent.wire.properties import ACCEPT, TENSOR, TRACE
from agent.wire.session import SessionStep
from agent.wire.topics import ANONYMOUS, PREFIX, Reply, format_topic, is_reply_name, parse_topic

# Type and subtype have at most 127 characters each (RFC 6838, 4.2); this leaves room for no parameter, and
# none has a meaning here.
MAX_CONTENT_TYPE_CHARACTERS: Final = 255
# All descriptions of raw tensors together: with escaped quotes half of what a frame to the worker holds.
MAX_TENSOR_CHARACTERS: Final = 16 * 1024
# It names a request; UUIDs have 16 bytes. It is stored with each answer that is remembered.
MAX_CORRELATION_BYTES: Final = 1024
# W3C Trace Context, 3.3.1.5: at least 512 characters of tracestate are carried on; traceparent has 55.
MAX_TRACE_CHARACTERS: Final = 1024
_MAX_TRACES: Final = 8
# All who ask without a user are one client, and a session's name is what keeps them apart: 64 random bits in
# hexadecimal, as the clients choose it.
MIN_ANONYMOUS_SESSION_CHARACTERS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class InferMessage:
    """One request as it crosses MQTT.

    Attributes
    ----------
    reply_to
        The topic for the answer, a `topics.Reply`.
    body
        The payload; with an envelope, `reply_to`, `id` and `deadline_s` are among its keys.
    content_type
        The media type of the body.
    tensors
        One `name;FP32;1,3,4` for each tensor of a raw body, in order.
    accept
        The content type that the answer should have, or None.
    correlation
        What the answer must echo, or None.
    deadline_s
        Seconds until the answer is of no use, or None.
    id
        The requester's name for the request, from the envelope, or None.
    has_envelope
        The requester has no MQTT 5 properties: status and message belong in the answer's JSON.
    trace
        User properties that the answer carries on; none if they are too long.
    session
        Which step of which session it is, or None.
    refusal
        Why the request must be refused: a property is over a limit. The properties in this object are within
        theirs, except for `correlation`, which a refusal repeats and nothing else keeps.
    """

    reply_to: str
    body: bytes = field(repr=False)
    content_type: str = JSON
    tensors: tuple[str, ...] = ()
    accept: str | None = None
    correlation: bytes | None = None
    deadline_s: float | None = None
    id: str | None = None
    has_envelope: bool = False
    trace: tuple[tuple[str, str], ...] = ()
    session: SessionStep | None = None
    refusal: RequestError | None = None

    def properties(self) -> Properties:
        """Return the MQTT 5 properties of the message."""
        accept = () if self.accept is None else ((ACCEPT, self.accept),)
        return Properties(
            content_type=self.content_type,
            response_topic=self.reply_to,
            correlation_data=self.correlation,
            expiry_s=None if self.deadline_s is None else max(1, math.ceil(self.deadline_s)),
            utf8=self.content_type == JSON,
            user=(
                *((TENSOR, tensor) for tensor in self.tensors),
                *accept,
                *(() if self.session is None else self.session.properties()),
                *self.trace,
            ),
        )

    @classmethod
    def with_envelope(cls, envelope: Envelope, body: bytes) -> InferMessage:
        """Make a request for a broker without MQTT 5.

        Parameters
        ----------
        envelope
            Where the answer goes, and until when.
        body
            The request's JSON, without the envelope.

        Raises
        ------
        FormatError
            If `body` is not a JSON object.
        """
        identifier = envelope.id
        return cls(
            reply_to=envelope.reply_to or "",
            body=write_envelope(envelope, body),
            correlation=None if identifier is None else identifier.encode(),
            deadline_s=envelope.deadline_s,
            id=identifier,
            has_envelope=True,
            session=envelope.session,
        )

    @classmethod
    def from_message(cls, message: Message, user: str | None = None) -> InferMessage:
        """Read a request.

        Parameters
        ----------
        message
            The message.
        user
            The client that the topic names; None if it names none.

        Raises
        ------
        UnanswerableError
            If it names no reply topic for an answer, or its user has a name that no user can have.
        """
        properties = message.properties
        if properties.response_topic is None:
            request = _from_envelope(message)
        else:
            error, session = _over_limit(message), None
            if error is None:
                session, error = _session(properties)
            request = cls(
                reply_to=properties.response_topic,
                body=message.payload,
                content_type=JSON if error is not None else properties.content_type or JSON,
                tensors=() if error is not None else properties.all(TENSOR),
                accept=None if error is not None else properties.first(ACCEPT),
                correlation=properties.correlation_data,
                deadline_s=None if properties.expiry_s is None else float(properties.expiry_s),
                trace=_trace(properties),
                session=session,
                refusal=error,
            )
        reply = parse_topic(request.reply_to)
        if not isinstance(reply, Reply):
            raise UnanswerableError(
                "foreign_response_topic",
                f"expected a topic below {PREFIX}/replies/ for the answer, got {request.reply_to[:200]!r}",
            )
        return _of_anybody(request) if user is None else _of_user(request, reply, user)


def _of_user(request: InferMessage, reply: Reply, user: str) -> InferMessage:
    """Return a user's request, with a refusal if its answer would go to another one.

    The refusal goes to the user: an answer that others could cause would be believed by programs that read
    all that arrives.
    """
    if reply.client == user != ANONYMOUS:
        return request
    if not is_reply_name(user):
        raise UnanswerableError(
            "foreign_user", f"expected the name of a user in the topic, got {user[:200]!r}"
        )
    if user == ANONYMOUS:
        error = InputError(
            f"expected the name of a user in the topic of the request, got {user!r}",
            hint="without a user, the topic ends in /infer",
        )
        return _refused(request, reply, user, error)
    error = InputError(
        f"expected a Response Topic below {PREFIX}/replies/{user}/, whose user asks, got one below "
        f"{PREFIX}/replies/{reply.client}/",
        hint="the user in the topic of the request and in the Response Topic are the same",
    )
    return _refused(request, reply, user, error)


def _refused(request: InferMessage, reply: Reply, user: str, error: InputError) -> InferMessage:
    try:
        reply_to = format_topic(Reply(user, reply.suffix))
    except ValueError:  # it became too long
        raise UnanswerableError("foreign_response_topic", str(error)) from error
    return replace(request, reply_to=reply_to, refusal=error)


def _of_anybody(request: InferMessage) -> InferMessage:
    session = request.session
    if session is None or request.refusal or len(session.name) >= MIN_ANONYMOUS_SESSION_CHARACTERS:
        return request
    error = InputError(
        f"session: expected a random name of at least {MIN_ANONYMOUS_SESSION_CHARACTERS} characters from a "
        f"client without a user in the topic, got {len(session.name)}",
        hint="ask on .../infer/<user>, or choose a name that others cannot guess",
    )
    return replace(request, refusal=error)


def _from_envelope(message: Message) -> InferMessage:
    properties = message.properties
    if properties.content_type not in (None, JSON):
        raise _no_topic(f"no Response Topic beside {properties.content_type[:80]!r}")
    try:
        envelope = read_envelope(message.payload)
    except InputError as error:
        raise _no_topic(f"no Response Topic, and in the payload: {error}") from error
    if envelope.reply_to is None:
        raise _no_topic("expected a Response Topic, or reply_to in the payload, got neither")
    over_limit = _over_limit(message)
    correlation = properties.correlation_data
    if correlation is None and envelope.id is not None:
        correlation = envelope.id.encode("utf-8", "surrogatepass")
    expiry_s = None if properties.expiry_s is None else float(properties.expiry_s)
    return InferMessage(
        reply_to=envelope.reply_to,
        body=message.payload,
        tensors=() if over_limit is not None else properties.all(TENSOR),
        accept=None if over_limit is not None else properties.first(ACCEPT),
        correlation=correlation,
        deadline_s=envelope.deadline_s or expiry_s,
        id=envelope.id,
        has_envelope=True,
        trace=_trace(properties),
        session=envelope.session,
        refusal=over_limit or _unrepeatable(envelope.session, correlation),
    )


def _session(properties: Properties) -> tuple[SessionStep | None, RequestError | None]:
    try:
        session = SessionStep.of(properties)
    except InputError as error:
        return None, error
    return session, _unrepeatable(session, properties.correlation_data)


def _unrepeatable(session: SessionStep | None, correlation: bytes | None) -> RequestError | None:
    """Return the error for a step that could not be told from its repetition."""
    if session is None or correlation:
        return None
    return InputError(
        "a session: expected Correlation Data, or id in the JSON, different for each request, got none",
        hint="without it, a repeated delivery would be a second step",
    )


def _no_topic(message: str) -> UnanswerableError:
    return UnanswerableError("no_response_topic", message)


def _over_limit(message: Message) -> RequestError | None:
    """Return the error for the first property of a request that is over its limit; None if all are within."""
    properties = message.properties
    if message.refusal is not None:
        return InputError(message.refusal)
    for name, text in (("Content Type", properties.content_type), (ACCEPT, properties.first(ACCEPT))):
        if text is not None and not _is_short(text, MAX_CONTENT_TYPE_CHARACTERS):
            return MediaTypeError(
                f"expected {name} of at most {MAX_CONTENT_TYPE_CHARACTERS} printable ASCII characters, "
                f"got {len(text)}: {text[:40]!a}"
            )
    if not _is_short("".join(properties.all(TENSOR)), MAX_TENSOR_CHARACTERS):
        return InputError(
            f"expected descriptions of tensors of at most {MAX_TENSOR_CHARACTERS} printable ASCII characters "
            "together, got more or others"
        )
    correlation = properties.correlation_data
    if correlation is not None and len(correlation) > MAX_CORRELATION_BYTES:
        return InputError(
            f"expected Correlation Data of at most {MAX_CORRELATION_BYTES} bytes, got {len(correlation)}"
        )
    return None


def _is_short(text: str, limit: int) -> bool:
    return len(text) <= limit and text.isascii() and text.isprintable()


def _trace(properties: Properties) -> tuple[tuple[str, str], ...]:
    found = tuple((name, value) for name, value in properties.user if name in TRACE)
    # A receiver may drop trace context that it cannot carry (W3C Trace Context, 4.3).
    too_long = len(found) > _MAX_TRACES or sum(len(value) for _, value in found) > MAX_TRACE_CHARACTERS
    return () if too_long else found
