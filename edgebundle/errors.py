"""Every error of the client, by whose fault it is.

::

    ClientError
    ├── UsageError              an argument cannot be used (also a ValueError)
    ├── BrokerError             the broker cannot be reached, or refuses
    ├── UnknownAgentError       the broker knows no such agent or group
    ├── NoAnswerError           no answer came in time (also a TimeoutError)
    ├── BadAnswerError          what came is not the answer of an agent
    ├── ClosedError             the client was closed
    └── RefusedError            the agent answered with a status that is not 200
        ├── InputError              the input does not fit the model              400
        ├── UnknownModelError       no such model runs there                      404
        ├── DeadlineError           too late (also a TimeoutError)                408
        ├── SessionStepError        not the next step of its session              409
        ├── SessionGoneError        its session has ended                         410
        ├── PayloadError            the payload is too long                       413
        ├── MediaTypeError          the content type is not supported             415
        ├── ExecutionError          the model failed                              500
        └── OverloadedError         the queue stayed full until the deadline      503

The names of the refusals are those of the agent (`agent.errors`). A message is one line, "expected X, got Y";
`hint` says what to do about it. Foreign exceptions are wrapped once, where the foreign library is called.
"""

from __future__ import annotations

from typing import ClassVar, Final


class ClientError(Exception):
    """A failure that can be explained in one line.

    Parameters
    ----------
    message
        What was expected and what was found.
    hint
        What the user can do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message

    @property
    def message(self) -> str:
        """The message without the hint."""
        return super().__str__()


class UsageError(ClientError, ValueError):
    """An argument cannot be used: a broker's address, a name, an input.

    Parameters
    ----------
    message, hint
        As in `ClientError`; the hint is required.
    """

    hint: str

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message, hint=hint)


class BrokerError(ClientError):
    """The broker cannot be reached, or refuses."""


class UnknownAgentError(ClientError):
    """The broker knows no agent, or no group, of that name."""


class NoAnswerError(ClientError, TimeoutError):
    """No answer came before the deadline."""


class BadAnswerError(ClientError):
    """What came is not the answer of an agent."""


class ClosedError(ClientError):
    """The client was closed, perhaps while the request was under way."""

    def __init__(self, message: str) -> None:
        super().__init__(message, hint="make another Client")


class RefusedError(ClientError):
    """The agent answered with a status that is not 200.

    Parameters
    ----------
    message
        What the agent said.
    hint
        What the user can do about it, or None.
    status
        The answer's status; None for that of the class.

    Attributes
    ----------
    status
        The answer's status.
    """

    default_status: ClassVar[int] = 0
    default_hint: ClassVar[str | None] = None

    def __init__(self, message: str, *, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(message, hint=hint or self.default_hint)
        self.status = self.default_status if status is None else status


class InputError(RefusedError):
    """The input's names, shapes, datatypes or payload do not fit the model."""

    default_status = 400
    default_hint = "`info()` of the model, or `edgebundle agents --json`, lists its inputs"


class UnknownModelError(RefusedError):
    """No model of that name runs there."""

    default_status = 404
    default_hint = "`edgebundle agents` lists the models of each agent"


class DeadlineError(RefusedError, TimeoutError):
    """The deadline passed while the request waited or was computed."""

    default_status = 408
    default_hint = "allow more time with a longer deadline, or send fewer requests"


class SessionStepError(RefusedError):
    """The request is not the next step of its session: an answer before it was lost."""

    default_status = 409
    default_hint = "begin again: session.reset()"


class SessionGoneError(RefusedError):
    """The session has ended: others took its place, it was unused, or the model was restarted."""

    default_status = 410
    default_hint = "begin again: session.reset()"


class PayloadError(RefusedError):
    """The payload is longer than an agent accepts."""

    default_status = 413
    default_hint = "send a smaller picture, or fewer tensors in one request"


class MediaTypeError(RefusedError):
    """The model or the agent does not take this kind of payload."""

    default_status = 415
    default_hint = "send a JPEG or PNG if the model has preprocessing, or tensors if it does not"


class ExecutionError(RefusedError):
    """The model failed while it ran."""

    default_status = 500
    default_hint = "read the agent's log on the device: journalctl -u edge-agent"


class OverloadedError(RefusedError):
    """The model's queue was full, or the model was out of service, until the deadline."""

    default_status = 503
    default_hint = "try again later, or deploy the model to more agents"


_BY_STATUS: Final[dict[int, type[RefusedError]]] = {
    kind.default_status: kind
    for kind in (
        InputError,
        UnknownModelError,
        DeadlineError,
        SessionStepError,
        SessionGoneError,
        PayloadError,
        MediaTypeError,
        ExecutionError,
        OverloadedError,
    )
}


def refusal(status: int, message: str, hint: str | None = None) -> RefusedError:
    """Return the error for an answer with a status that is not 200.

    Parameters
    ----------
    status
        One of those in docs/mqtt.md, or another one, which a later agent may use.
    message, hint
        What the agent said.
    """
    kind = _BY_STATUS.get(status, RefusedError)
    return kind(message or f"the agent answered with status {status}", hint=hint or None, status=status)
