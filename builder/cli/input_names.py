"""The inputs that a command line names; needs neither numpy nor a library of pictures."""

from __future__ import annotations

from collections.abc import Iterable
from glob import has_magic
from pathlib import Path

from builder.errors import ModelError
from builder.spelling import similar_file


def named_inputs(groups: Iterable[list[str]] | None) -> list[str]:
    """Return the values of all flags `--inputs`, each of which may have several."""
    return [name for group in groups or () for name in group]


def is_many(name: str) -> bool:
    """Return whether a name stands for several files: a folder, or a pattern."""
    return Path(name).is_dir() or (has_magic(name) and not Path(name).exists())


def check_named(names: Iterable[str]) -> None:
    """Check that each named file exists; `-` is standard input.

    Raises `ModelError` if one does not; the hint names the file that is most like it.
    """
    for name in names:
        if name != "-" and not is_many(name) and not Path(name).exists():
            raise ModelError(f"{name}: cannot be read (No such file or directory)", hint=similar_file(name))
