"""What a command said to a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """Exit code, standard output, and the lines of standard error."""

    code: int
    out: str
    err: list[str]


Terminal = Callable[..., Said]
