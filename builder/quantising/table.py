"""How reports print their rows in a terminal: one line each, the texts below each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_WIDTH: Final = 16


def lines(rows: Iterable[tuple[str, str]], width: int = _WIDTH) -> list[str]:
    """Return rows of a name and a text as lines.

    Parameters
    ----------
    rows
        Name and text.
    width
        Characters of the column of names.
    """
    return [f"  {name:<{width}}{text}" for name, text in rows]
