"""Items that could not be used: each is one error, and the others go on."""

from __future__ import annotations

from typing import Final

from agent.terminal import note, redraw

# If every item is wrong for the same reason, the screen should not fill.
_MOST_SHOWN: Final = 20


class Failures:
    """Shows the first errors, and counts all.

    Parameters
    ----------
    kind
        What the items are, in the plural.

    Attributes
    ----------
    count
        How many there were.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._hints: set[str] = set()
        self.count = 0

    def add(self, where: str, error: Exception) -> None:
        """Take the error of an item; a hint is shown once."""
        self.count += 1
        if self.count > _MOST_SHOWN:
            return
        redraw()
        reason = " ".join(str(getattr(error, "message", error)).split())
        note(f"edgebundle: error: {'' if where in reason else f'{where}: '}{reason}")
        hint = getattr(error, "hint", None)
        if hint and hint not in self._hints:
            self._hints.add(hint)
            note(f"edgebundle: hint: {hint}")

    def end(self) -> None:
        """Say how many errors were not shown."""
        if self.count > _MOST_SHOWN:
            note(f"edgebundle: error: {self.count - _MOST_SHOWN} more {self._kind}")
