"""How reports print their rows in a terminal: one line each, the texts below each other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

_WIDTH: Final = 16
NAMED: Final = 3  # nodes or blocks that a line names
_NAME_CHARS: Final = 40


def lines(rows: Iterable[tuple[str, str]], width: int = _WIDTH) -> list[str]:
    """Return rows of a name and a text as lines."""
    return [f"  {name:<{width}}{text}" for name, text in rows]


def names(listed: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(listed) - NAMED} more" if len(listed) > NAMED else ""
    return ", ".join(map(short, listed[:NAMED])) + more


def short(name: str) -> str:
    """Return the end of a long name."""
    return name if len(name) <= _NAME_CHARS else f"…{name[1 - _NAME_CHARS :]}"
