"""Errors of the agent and of the bundle format, by whose fault they are.

::

    EdgeError
    ├── BundleError               a bundle that is not taken
    │   ├── SignatureError            not signed by a trusted key            ERR_ARBITRARY_SOFTWARE
    │   ├── FormatError               not the bytes that our writer writes   ERR_ARBITRARY_SOFTWARE
    │   ├── MixAndMatchError          its parts, or its name, do not match   ERR_MIX_AND_MATCH
    │   ├── EndlessDataError          over a limit                           ERR_ENDLESS_DATA
    │   ├── RollbackError             older than what was committed          ERR_ROLLBACK
    │   ├── IncompatibleError         made for another machine               ERR_INCOMPATIBLE
    │   ├── KeyRevokedError           signed by a key that was revoked       ERR_KEY_REVOKED
    │   └── SelfTestError             its recorded samples do not come out   ERR_SELF_TEST
    ├── RequestError              one inference request that cannot be answered
    │   ├── InputError                400
    │   ├── UnknownModelError         404
    │   ├── DeadlineError             408
    │   ├── MediaTypeError            415
    │   ├── ExecutionError            500
    │   └── OverloadedError           503
    ├── StoreError                what is kept on disk cannot be read or written
    │   ├── StateDirectoryError       there is no place to keep it
    │   └── NoSpaceError              ERR_NO_SPACE
    ├── ConflictError             a desired document that was written from another one  ERR_CONFLICT
    ├── ConfigError               the configuration, or a file that it names
    └── SourceError               a source of bundles refused or cannot be reached

A message says what was expected and what came, in one line and without a final full stop; `hint` says what
to do about it. `code` travels over MQTT and never changes its meaning. Foreign exceptions are wrapped once,
where the foreign library is called.
"""

from __future__ import annotations


class EdgeError(Exception):
    """A failure that is explained in one line.

    Parameters
    ----------
    message
        What was expected and what came.
    hint
        What the user can do about it, or None.
    """

    code: str = "ERR_INTERNAL"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class BundleError(EdgeError):
    """A bundle that is not taken."""

    code = "ERR_ARBITRARY_SOFTWARE"


class SignatureError(BundleError):
    """The bundle is not signed by a key that is trusted here."""


class FormatError(BundleError):
    """The bytes are not those that the format's own writer would have written."""


class MixAndMatchError(BundleError):
    """The files do not match the signed manifest, or the manifest is another model's."""

    code = "ERR_MIX_AND_MATCH"


class EndlessDataError(BundleError):
    """A size or a count is over its limit."""

    code = "ERR_ENDLESS_DATA"


class RollbackError(BundleError):
    """The bundle is older than what this device has committed for its name."""

    code = "ERR_ROLLBACK"


class IncompatibleError(BundleError):
    """The bundle was made for another machine."""

    code = "ERR_INCOMPATIBLE"


class KeyRevokedError(BundleError):
    """The bundle is signed by a key that was revoked."""

    code = "ERR_KEY_REVOKED"


class SelfTestError(BundleError):
    """The bundle's recorded samples do not come out as recorded."""

    code = "ERR_SELF_TEST"


class RequestError(EdgeError):
    """One inference request that cannot be answered; `status` is what the requester is told."""

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


class MediaTypeError(RequestError):
    """A content type that is not served."""

    status = 415


class ExecutionError(RequestError):
    """The model failed while it ran."""

    status = 500


class OverloadedError(RequestError):
    """The model's queue is full."""

    status = 503


class StoreError(EdgeError):
    """What is kept on disk cannot be read or written."""

    code = "ERR_STORE"


class StateDirectoryError(StoreError):
    """The state directory cannot be made or written to by who we are."""


class NoSpaceError(StoreError):
    """The disk, or the memory that stands in for it, is full."""

    code = "ERR_NO_SPACE"


class ConflictError(EdgeError):
    """A desired document was written from one that is not the one in force."""

    code = "ERR_CONFLICT"


class ConfigError(EdgeError):
    """The configuration, or a file that it names, cannot be used."""

    code = "ERR_CONFIG"
    # sysexits.h EX_CONFIG: systemd's RestartPreventExitStatus= keeps a wrong configuration from looping.
    exit_code: int = 78


class SourceError(EdgeError):
    """A source of bundles refused, or cannot be reached."""

    code = "ERR_SOURCE"
