"""The committed security counters: below which nothing is installed, for each model's name.

Promises: a counter never goes down. The file is apart from the bundles and outlives them, is written twice,
and of the two copies the higher value counts, so that neither damage nor an older copy lowers anything.
Leaves to others: when a bundle has earned its counter (installer.py), and refusing (agent.bundle.admission).
"""

from __future__ import annotations

from pathlib import Path

from agent.deploy.store.state_file import Checkpoint, StateFile, no_checkpoint


class Counters:
    """The counters of one device, kept in `counters.json`.

    Parameters
    ----------
    path
        The file.
    checkpoint
        Called after each durable step, for fault injection.
    """

    def __init__(self, path: Path, *, checkpoint: Checkpoint = no_checkpoint) -> None:
        self._file = StateFile(path, mirrored=True, checkpoint=checkpoint)
        self._committed = _highest(self._file.load_all())

    def get(self, name: str) -> int | None:
        """Return the counter of `name`; None before anything was committed for it."""
        return self._committed.get(name)

    def commit(self, name: str, counter: int) -> None:
        """Raise the counter of `name` to `counter`; nothing happens if it is that high already.

        Raises
        ------
        NoSpaceError, StoreError
            If it could not be written, and is what it was.
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
