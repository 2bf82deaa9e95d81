"""The inputs that a command line names; needs neither numpy nor a library of pictures."""

from __future__ import annotations

from collections.abc import Iterable
from glob import has_magic
from pathlib import Path


def named_inputs(groups: Iterable[list[str]] | None) -> list[str]:
    """Return the values of all flags `--inputs`, each of which may have several."""
    return [name for group in groups or () for name in group]


def is_many(name: str) -> bool:
    """Return whether a name stands for several files: a folder, or a pattern."""
    return Path(name).is_dir() or (has_magic(name) and not Path(name).exists())
