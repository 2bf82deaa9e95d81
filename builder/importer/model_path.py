"""The path of a model: what a mistyped one might have meant. Imports no library."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from builder.errors import ModelError

EXPORT_HINT: Final = "download or export the model again"
_SUFFIXES: Final = frozenset({".onnx", ".pt2"})
_LISTED: Final = 6  # how many models a hint names


def require_file(path: Path) -> None:
    """Refuse a path that does not exist or is a folder.

    Raises
    ------
    ModelError
        If so; the hint names the models in the folder.
    """
    try:
        if path.is_dir():
            raise ModelError(f"expected an ONNX file, got a folder: {path}", hint=models_in(path))
        if not path.exists():
            raise ModelError(f"no such file: {path}", hint=models_in(path.parent))
    except (OSError, ValueError) as error:  # a name that is too long, or with a null character
        raise ModelError(
            f"cannot read {str(path)!r:.200}: {getattr(error, 'strerror', None) or error}"
        ) from error


def models_in(folder: Path) -> str:
    """A hint that names the models in a folder, for a user who mistyped one."""
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES)
    except OSError:
        names = []
    if not names:
        return EXPORT_HINT
    return f"in {folder}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
