"""Every error of the agent and of the bundle format that crosses a file boundary, by whose fault it is.

::

    EdgeError
    ├── BundleError             a bundle that is refused
    │   ├── SignatureError          not signed by a trusted key                       ERR_ARBITRARY_SOFTWARE
    │   ├── FormatError             not the bytes that our writer writes              ERR_ARBITRARY_SOFTWARE
    │   ├── MixAndMatchError        its parts or its name do not match                ERR_MIX_AND_MATCH
    │   ├── EndlessDataError        over a limit                                      ERR_ENDLESS_DATA
    │   ├── RollbackError           older than the committed bundle                   ERR_ROLLBACK
    │   ├── CounterAheadError       its counter would lock out later bundles          ERR_COUNTER_AHEAD
    │   ├── IncompatibleError       made for another machine                          ERR_INCOMPATIBLE
    │   ├── KeyRevokedError         signed by a revoked key                           ERR_KEY_REVOKED
    │   └── SelfTestError           its samples give other results                    ERR_SELF_TEST
    ├── RequestError            an inference request that is answered with an error
    │   ├── InputError              the input does not fit the model                  400
    │   ├── UnknownModelError       no such model runs here                           404
    │   ├── DeadlineError           too late                                          408
    │   ├── SessionStepError        not the next step of its session                  409
    │   ├── SessionGoneError        its session has ended                             410
    │   ├── PayloadError            the payload is too long                           413
    │   ├── MediaTypeError          unsupported content type                          415
    │   ├── ExecutionError          the model failed                                  500
    │   └── OverloadedError         the queue is full                                 503
    ├── UnanswerableError       an inference request without a usable reply topic
    ├── ChannelError            bytes between agent and worker that are not a frame   ERR_CHANNEL
    ├── StoreError              the device's storage cannot be read or written        ERR_STORE
    │   ├── StateDirectoryError     the state directory cannot be created or used
    │   ├── InUseError              another agent uses the state directory
    │   ├── BusyError               more documents than an SD card should store
    │   └── DiskError               the disk refuses: read-only, failing, gone
    │       └── NoSpaceError            the disk is full                              ERR_NO_SPACE
    ├── ConflictError           a desired document based on an outdated one           ERR_CONFLICT
    ├── ConfigError             the configuration, or a file that it names            exit code 78
    │   ├── PermissionDeniedError   a file that this user may not read
    │   ├── KeyringError            the list of revoked keys is damaged               ERR_KEYRING
    │   └── EnrollmentError         values given to `edge-agent enroll`               exit code 4
    ├── BrokerError             the broker cannot be reached, or refuses              ERR_BROKER
    │   └── UnreachableError        the same, with its cause identified
    ├── MalformedPacketError    an MQTT packet that breaks the protocol               ERR_PROTOCOL
    └── SourceError             a bundle source refuses, or cannot be reached         ERR_SOURCE

A message says "expected X, got Y" in one line without a final full stop; `hint` says what to do about it.
A `code` is sent over MQTT and never changes its meaning. A foreign exception is wrapped once, where the
foreign library is called.
"""

from __future__ import annotations


class EdgeError(Exception):
    """A failure that can be explained in one line.

    Parameters
    ----------
    message
        What was expected and what was found.
    hint
        What the user can do about it, or None.
    """

    code: str = "ERR_INTERNAL"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BundleError(EdgeError):
    """A bundle that is refused."""

    code = "ERR_ARBITRARY_SOFTWARE"
    exit_code: int = 4


class SignatureError(BundleError):
    """The bundle is not signed by a key that this device trusts."""


class FormatError(BundleError):
    """The bytes are not those that the format's own writer would have written."""


class MixAndMatchError(BundleError):
    """The files do not match the signed manifest, or the manifest belongs to another model."""

    code = "ERR_MIX_AND_MATCH"


class EndlessDataError(BundleError):
    """A size or a count is over its limit."""

    code = "ERR_ENDLESS_DATA"


class RollbackError(BundleError):
    """The bundle is older than the one this device has committed under its name."""

    code = "ERR_ROLLBACK"


class CounterAheadError(BundleError):
    """The bundle's security counter is ahead of time, and would lock out later builds."""

    code = "ERR_COUNTER_AHEAD"


class IncompatibleError(BundleError):
    """The bundle was made for another machine."""

    code = "ERR_INCOMPATIBLE"


class KeyRevokedError(BundleError):
    """The bundle is signed by a revoked key."""

    code = "ERR_KEY_REVOKED"


class SelfTestError(BundleError):
    """The bundle's recorded samples give other results than recorded."""

    code = "ERR_SELF_TEST"


class RequestError(EdgeError):
    """An inference request that is answered with an error; `status` is sent to the requester."""

    code = "ERR_REQUEST"
    status: int = 500


class InputError(RequestError):
    """The request's names, shapes, datatypes or payload do not fit the model."""

    status = 400


class UnknownModelError(RequestError):
    """No such model runs on this device."""

    status = 404


class DeadlineError(RequestError):
    """The request's deadline passed before it was answered."""

    status = 408


class SessionStepError(RequestError):
    """The request is not the next step of its session."""

    status = 409


class SessionGoneError(RequestError):
    """The request's session has ended: it made room, was unused or is full, or the model was restarted."""

    status = 410


class PayloadError(RequestError):
    """The payload is longer than a model accepts."""

    status = 413


class MediaTypeError(RequestError):
    """The content type is not supported."""

    status = 415


class ExecutionError(RequestError):
    """The model failed while it ran."""

    status = 500


class OverloadedError(RequestError):
    """The model's queue is full."""

    status = 503


class UnanswerableError(EdgeError):
    """An inference request that names no reply topic the agent may write to.

    Parameters
    ----------
    reason
        One word, for the metric's label.
    message
        What is wrong with the request.
    """

    code = "ERR_REQUEST"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ChannelError(EdgeError):
    """The bytes between agent and worker are not a valid frame."""

    code = "ERR_CHANNEL"


class StoreError(EdgeError):
    """The device's storage cannot be read or written."""

    code = "ERR_STORE"


class StateDirectoryError(StoreError):
    """The agent's user cannot create the state directory, or cannot write to it."""


class InUseError(StoreError):
    """Another agent uses the state directory."""


class BusyError(StoreError):
    """More documents came than an SD card should store; the latest is taken later."""


class DiskError(StoreError):
    """The disk refuses for now: it is full, read-only, failing, gone, or does not respond.

    What failed because of it is worth another attempt when the disk is back.
    """


class NoSpaceError(DiskError):
    """The disk, or the memory used in its place, is full."""

    code = "ERR_NO_SPACE"


class ConflictError(EdgeError):
    """The desired document was based on one that is no longer in force."""

    code = "ERR_CONFLICT"


class ConfigError(EdgeError):
    """The configuration, or a file that it names, cannot be used."""

    code = "ERR_CONFIG"
    # sysexits.h EX_CONFIG.
    exit_code: int = 78


class PermissionDeniedError(ConfigError):
    """The current user may not read a file."""


class KeyringError(ConfigError):
    """The list of revoked keys cannot be read completely, so no new bundle is accepted."""

    code = "ERR_KEYRING"


class EnrollmentError(ConfigError):
    """The values given to `edge-agent enroll` cannot be used, or do not work."""

    exit_code = 4


class BrokerError(EdgeError):
    """The broker cannot be reached, or refuses a request.

    Parameters
    ----------
    message, hint
        As in `EdgeError`.
    reason_code
        The MQTT 5 reason code, or one of ours above 0xFF; `agent.mqtt.reason_codes` has a row for each.
    """

    code = "ERR_BROKER"

    def __init__(self, message: str, reason_code: int, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason_code = reason_code


class UnreachableError(BrokerError):
    """There is no connection to the broker, and the cause is known.

    Parameters
    ----------
    message, reason_code, hint
        As in `BrokerError`.
    kind
        The cause in one word, for programs and tests; `agent.mqtt.diagnosis` lists them.
    passing
        Whether the cause may go away by itself: the network may not be up yet, or the clock not set.
    """

    hint: str

    def __init__(self, message: str, reason_code: int, *, hint: str, kind: str, passing: bool) -> None:
        super().__init__(message, reason_code, hint=hint)
        self.kind = kind
        self.passing = passing


class MalformedPacketError(EdgeError):
    """A packet from the broker breaks the rules of MQTT."""

    code = "ERR_PROTOCOL"


class SourceError(EdgeError):
    """A source of bundles refuses, or cannot be reached."""

    code = "ERR_SOURCE"
