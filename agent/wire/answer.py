"""An answer to an inference request: status, content type, properties, and the head of its JSON.

A refusal is an answer with another status than 200. With MQTT 5 the status travels as a user property; to a
requester without properties it is a member of the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import (
    DeadlineError,
    ExecutionError,
    FormatError,
    InputError,
    MediaTypeError,
    OverloadedError,
    PayloadError,
    RequestError,
    SessionGoneError,
    SessionStepError,
    UnknownModelError,
)
from agent.mqtt.message import Message
from agent.mqtt.properties import Properties
from agent.wire import document
from agent.wire.answer_head import OK, AnswerHead, one_line
from agent.wire.content_types import JSON, RAW
from agent.wire.properties import MODEL_VERSION, SERVER_TIMING, SESSION_STEP, STATUS, STATUS_MESSAGE, TENSOR
from agent.wire.tensors import JsonTensor, parse_tensor

# With MQTT 5, answers are raw. Reading so many values from JSON takes a third of a second.
MAX_JSON_VALUES: Final = 1 << 20
OVERLOADED: Final = OverloadedError.status
# Every status that an answer can have.
STATUSES: Final = (
    OK,
    InputError.status,
    UnknownModelError.status,
    DeadlineError.status,
    SessionStepError.status,
    SessionGoneError.status,
    PayloadError.status,
    MediaTypeError.status,
    ExecutionError.status,
    OverloadedError.status,
)


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """An answer as an agent publishes it, without what belongs to one delivery (topic, correlation, expiry).

    Attributes
    ----------
    status, message
        200 and an empty message, or another status and the reason.
    content_type, payload
        What the requester gets; a refusal is always JSON.
    model_version
        Of the model that answered; empty in a refusal.
    tensors
        One `name;FP32;1,3,4` for each tensor of a raw payload, in order.
    server_timing
        Where the device's part of the time went, as `server_timing` writes it; empty if nothing was computed.
    session_step
        The request's number in its session, or None.
    """

    status: int
    message: str
    content_type: str
    payload: bytes = field(repr=False)
    model_version: str = ""
    tensors: tuple[str, ...] = ()
    server_timing: str = ""
    session_step: int | None = None

    def properties(
        self, *, correlation: bytes | None, expiry_s: int, trace: tuple[tuple[str, str], ...] = ()
    ) -> Properties:
        """Return the MQTT 5 properties of the answer's message.

        Parameters
        ----------
        correlation
            The request's correlation data.
        expiry_s
            Seconds that the broker may keep the answer.
        trace
            User properties of the request that the answer carries on.
        """
        user = [(STATUS, str(self.status))]
        if self.message:
            user.append((STATUS_MESSAGE, one_line(self.message)))
        if self.model_version:
            user.append((MODEL_VERSION, self.model_version))
        if self.server_timing:
            user.append((SERVER_TIMING, self.server_timing))
        if self.session_step is not None:
            user.append((SESSION_STEP, str(self.session_step)))
        return Properties(
            content_type=self.content_type or None,
            correlation_data=correlation,
            expiry_s=expiry_s,
            utf8=self.content_type == JSON,
            user=(*user, *((TENSOR, tensor) for tensor in self.tensors), *trace),
        )


def refusal(error: RequestError, head: AnswerHead) -> FinalAnswer:
    """Return the answer to a request that was not, or could not be, computed."""
    return FinalAnswer(error.status, one_line(str(error)), JSON, head.refusal(error))


@dataclass(frozen=True, slots=True)
class ReceivedAnswer:
    """An answer as a requester reads it.

    `status` is 200, with an empty message, or another one with the reason and perhaps a hint. `tensors` are
    the outputs of a JSON answer; `raw` the little-endian bytes of all tensors, one after the other, and
    `raw_tensors` their descriptions. `server_timing` is where the device's part of the time went, as the
    agent wrote it. A refusal has no `model_version`.
    """

    status: int
    message: str
    hint: str = ""
    model_version: str = ""
    tensors: tuple[JsonTensor, ...] = ()
    raw: bytes | None = field(default=None, repr=False)
    raw_tensors: tuple[TensorSpec, ...] = ()
    server_timing: str | None = None


def read_answer(message: Message) -> ReceivedAnswer:
    """Read an answer, from MQTT 5's properties or from the JSON itself.

    Raises
    ------
    FormatError
        If it is not an answer of an agent.
    """
    properties = message.properties
    text = properties.first(STATUS_MESSAGE) or ""
    status = _status(properties.first(STATUS))
    if properties.content_type == RAW:
        try:
            specs = tuple(parse_tensor(tensor) for tensor in properties.all(TENSOR))
        except ValueError as error:
            raise FormatError(str(error)) from error
        version = properties.first(MODEL_VERSION) or ""
        return ReceivedAnswer(
            status=status or 0,
            message=text,
            model_version=version,
            raw=bytes(message.payload),
            raw_tensors=specs,
            server_timing=properties.first(SERVER_TIMING),
        )
    # A refusal may consist of its properties only.
    payload = message.payload or b"{}"
    body = document.parse_object(payload, "the answer", len(payload), MAX_JSON_VALUES)
    if status is None:
        status = document.integer(body.get("status"))
    outputs = body.get("outputs") or []
    if not isinstance(outputs, list):
        raise FormatError(f"expected outputs, an array, got {document.shown(outputs)}")
    return ReceivedAnswer(
        status=status or 0,
        # The property and `message` repeat the hint, for clients that read nothing else.
        message=document.text(body.get("error")) or text or document.text(body.get("message")),
        hint=document.text(body.get("hint")),
        model_version=document.text(body.get("model_version")),
        server_timing=properties.first(SERVER_TIMING),
        tensors=tuple(JsonTensor.from_document(output) for output in outputs),
    )


def _status(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 3):
        raise FormatError(f"expected a status such as 200, got {text!r:.80}")
    return int(text)
