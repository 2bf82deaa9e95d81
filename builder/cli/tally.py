"""What becomes of many items: one line for each error, and a line that sums up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

from agent.terminal import note, redraw

# If every item is wrong for the same reason, the screen should not fill.
_MOST_SHOWN: Final = 20
_MOST_NAMED: Final = 8  # kinds of answers in the summary


class Tally:
    """Counts answers and their kinds, shows the first errors, and counts all.

    `answered`, `failed`: how many items there were.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._hints: set[str] = set()
        self._seen: Counter[str] = Counter()
        self._began = time.monotonic()
        self.answered = 0
        self.failed = 0

    def add(self, kinds: Iterable[str]) -> None:
        """Count an answer, and what is in it."""
        self.answered += 1
        self._seen.update(kinds)

    def refuse(self, where: str, error: Exception) -> None:
        """Take the error of an item; a hint is shown once."""
        self.failed += 1
        if self.failed > _MOST_SHOWN:
            return
        redraw()
        reason = " ".join(str(getattr(error, "message", error)).split())
        note(f"edgebundle: error: {'' if where in reason else f'{where}: '}{reason}")
        hint = getattr(error, "hint", None)
        if hint and hint not in self._hints:
            self._hints.add(hint)
            note(f"edgebundle: hint: {hint}")

    def end(self) -> str:
        """Say how many errors were not shown, and return the summary.

        It is such as `24 inputs in 1.3 s, 54.2 ms each; 31 person, 4 bear; 1 could not be used`.
        """
        redraw()
        if self.failed > _MOST_SHOWN:
            note(f"edgebundle: error: {self.failed - _MOST_SHOWN} more {self._kind}s")
        seconds = time.monotonic() - self._began
        each_ms = 1e3 * seconds / max(1, self.answered)
        items = f"{self.answered} {self._kind}{'' if self.answered == 1 else 's'}"
        parts = [f"{items} in {seconds:.1f} s, {each_ms:.1f} ms each"]
        most = self._seen.most_common(_MOST_NAMED)
        if most:
            more = f" and {len(self._seen) - len(most)} more" if len(self._seen) > len(most) else ""
            parts.append(", ".join(f"{count} {name}" for name, count in most) + more)
        if self.failed:
            parts.append(f"{self.failed} could not be used")
        return "; ".join(parts)
