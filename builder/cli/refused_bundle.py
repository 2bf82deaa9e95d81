"""Explain a refused bundle to the user: which file was refused, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from agent.errors import (
    BundleError,
    EdgeError,
    FormatError,
    IncompatibleError,
    KeyRevokedError,
    MixAndMatchError,
    NoSpaceError,
    RollbackError,
    SelfTestError,
    SignatureError,
    SourceError,
)
from builder.errors import PackageError

# What to do when an agent refuses a deployment. An agent reports the wire code of one of these classes.
_DEPLOYMENT_HINTS: Final[dict[type[EdgeError], str]] = {
    SignatureError: "sign the bundle with a key that this agent trusts: see `edgebundle sign --help`",
    RollbackError: "compile it again: the counter rises with each build, unless --security-counter sets it",
    IncompatibleError: "compile it with the --target of that device, which `edgebundle agents` shows",
    KeyRevokedError: "sign it with a key that has not been revoked",
    MixAndMatchError: "the agent received another file than the one deployed: check what --source serves",
    NoSpaceError: "free some space on the device, or remove a model from it",
    SelfTestError: "the samples give other results on that device: compile for its CPU and features",
    SourceError: "add the https source to the agent's allow-list, or leave out --source to send it over MQTT",
}
_HINT_BY_CODE: Final = {error.code: hint for error, hint in _DEPLOYMENT_HINTS.items()}
_BROKEN_FILE: Final = "expected the .bundle that `edgebundle compile` wrote, whole and unchanged"


def deployment_hint(code: str) -> str | None:
    """Return what to do about a deployment that an agent ended with this wire code; None if unknown."""
    return _HINT_BY_CODE.get(code)


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Turn a bundle's refusal inside the block into an error that names the file.

    Parameters
    ----------
    path
        The bundle, as the user wrote it.

    Raises
    ------
    PackageError
        If the block raises a `BundleError`. The message names the file and the wire code. The error's own
        hint is kept; if it has none, a suitable one is added.
    """
    try:
        yield
    except BundleError as error:
        hint = error.hint or _local_hint(error)
        raise PackageError(f"{path}: {error} ({error.code})", hint=hint) from error


def _local_hint(error: BundleError) -> str:
    # Here the file is wrong, not the keys of an agent.
    if isinstance(error, SignatureError | FormatError):
        return _BROKEN_FILE
    return _DEPLOYMENT_HINTS.get(type(error), _BROKEN_FILE)
