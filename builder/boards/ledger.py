"""A ledger of the boards: the work of each one, and whether it ran at full speed."""

from __future__ import annotations

import threading
from typing import Final

from builder.boards.remote_functions import BoardState
from builder.records.meta_json import BoardTime

SLOWER: Final = 0.9  # a CPU below this share of its highest frequency seen is not at full speed


class Ledger:
    """The work of each board, and the highest frequency seen of each of its CPUs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, BoardTime] = {}
        self._since: dict[str, BoardTime] = {}
        self._top: dict[str, tuple[int, ...]] = {}

    def add(self, name: str, time_: BoardTime) -> None:
        """Add `time_` to the work of the board `name`."""
        with self._lock:
            for table in (self._times, self._since):
                table[name] = table.get(name, BoardTime()) + time_

    def is_valid(self, name: str, state: BoardState) -> bool:
        """Whether a board ran at full speed, judged by its `state` just after a measurement."""
        if state.throttled:
            return False
        with self._lock:
            now, top = state.frequencies_khz, self._top.get(name, ())
            if len(now) != len(top):
                self._top[name] = now
                return True
            self._top[name] = tuple(max(pair) for pair in zip(now, top, strict=True))
            # A governor may leave idle CPUs slow: the fastest one ran the kernel.
            return not now or max(now) >= SLOWER * max(self._top[name])

    def times(self) -> dict[str, BoardTime]:
        """Return the work of each board so far, by the board's name."""
        with self._lock:
            return dict(self._times)

    def take(self) -> dict[str, BoardTime]:
        """Return the work of each board since the last call, by the board's name."""
        with self._lock:
            since, self._since = self._since, {}
            return since
