"""In which order the models were last used: `last_use.json`, so that the next start loads those first.

Promises: it is written at most once an hour and at the end, and only if the order has changed; an SD card is
spared. If it is lost or damaged, models are loaded by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from agent.deploy.store.state_file import StateFile

LAST_USE_FILE: Final = "last_use.json"


class LastUse:
    """The names of models, the most recently used first."""

    def __init__(self, root: Path) -> None:
        self._file = StateFile(root / LAST_USE_FILE, mirrored=False)
        self._names: tuple[str, ...] = ()

    def load(self) -> None:
        """Read the file."""
        document = self._file.load()
        if isinstance(document, list):
            self._names = tuple(name for name in document if isinstance(name, str))

    def order(self, names: Iterable[str]) -> list[str]:
        """Return `names`, the most recently used first, then the others by name."""
        rank = {name: index for index, name in enumerate(self._names)}
        return sorted(names, key=lambda name: (rank.get(name, len(rank)), name))

    def record(self, names: Iterable[str]) -> bool:
        """Store the names, the most recently used first; return whether anything had to be written."""
        order = tuple(names)
        if order == self._names:
            return False
        self._file.save(list(order))
        self._names = order
        return True
