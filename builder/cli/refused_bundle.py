"""Explain a refused bundle to the user: which file was refused, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from agent.errors import BundleError, FormatError, SignatureError
from builder.errors import PackageError
from builder.fleet.hints import DEPLOYMENT_HINTS
from builder.importer.other_files import instead_of_bundle
from builder.spelling import similar_file

_BROKEN_FILE: Final = "expected the .bundle that `edgebundle compile` wrote, whole and unchanged"


@contextmanager
def naming_file(path: str) -> Iterator[None]:
    """Turn a bundle's refusal inside the block into an error that names the file.

    `path`: the bundle, as the user wrote it.
    Raises `PackageError` if the block raises a `BundleError`. The message names the file and the wire code.
        The error's own hint is kept; if it has none, a suitable one is added. Also if there is no such file.
    """
    try:
        yield
    except BundleError as error:
        other = instead_of_bundle(path) if isinstance(error, FormatError) else None
        if other is not None:
            raise PackageError(f"{path}: expected a bundle, got {other.what}", hint=other.hint) from error
        hint = error.hint or _local_hint(error)
        raise PackageError(f"{path}: {error} ({error.code})", hint=hint) from error
    except FileNotFoundError as error:
        if str(error.filename) != path:  # such as a folder to write to
            raise
        raise PackageError(f"{path}: cannot be read ({error.strerror})", hint=similar_file(path)) from error


def _local_hint(error: BundleError) -> str:
    # Here the file is wrong, not the keys of an agent.
    if isinstance(error, SignatureError | FormatError):
        return _BROKEN_FILE
    return DEPLOYMENT_HINTS.get(type(error), _BROKEN_FILE)
