"""The committed security counter of each model's name: no bundle below it is installed.

Promises: a counter is never lowered. The file is separate from the bundles and outlives them. It is written
twice, and the higher value of the two copies counts, so neither damage nor an older copy lowers a counter.
Leaves to others: when to commit a counter (`installer`), and refusing older bundles
(`agent.bundle.admission`).
"""

from __future__ import annotations

from pathlib import Path

from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint


class Counters:
    """The counters of one device, kept in `counters.json`."""

    def __init__(self, path: Path, *, checkpoint: Checkpoint = no_checkpoint) -> None:
        self._file = StateFile(path, mirrored=True, checkpoint=checkpoint)
        self._committed: dict[str, int] = {}

    def load(self) -> None:
        """Read the file; counters that are known already are not lowered."""
        self._committed = _highest([*self._file.load_all(), self._committed])

    def restore(self) -> None:
        """Write the file again if it is gone."""
        if self._committed and not self._file.exists:
            self._file.save(self._committed)

    def get(self, name: str) -> int | None:
        """Return the counter of `name`; None if none was committed."""
        return self._committed.get(name)

    def commit(self, name: str, counter: int) -> None:
        """Raise the counter of `name` to `counter`, unless it is already as high.

        If it cannot be written, the counter is unchanged.
        """
        if counter <= self._committed.get(name, -1):
            return
        committed = {**self._committed, name: counter}
        self._file.save(committed)
        self._committed = committed


def _highest(documents: list[object]) -> dict[str, int]:
    counters: dict[str, int] = {}
    for document in documents:
        if isinstance(document, dict):
            for name, counter in document.items():
                if type(counter) is int and counter > counters.get(name, -1):
                    counters[name] = counter
    return counters
