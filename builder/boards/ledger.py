"""A ledger: what boards did, and whether they were at speed when they did it."""

from __future__ import annotations

import threading
from typing import Final

from builder.boards.remote_functions import BoardState
from builder.records.meta_json import BoardTime

SLOWER: Final = 0.9  # a CPU below this share of its highest frequency seen was not at speed


class Ledger:
    """What boards did, and the highest frequency each was seen at."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times: dict[str, BoardTime] = {}
        self._since: dict[str, BoardTime] = {}
        self._top: dict[str, tuple[int, ...]] = {}

    def add(self, name: str, time_: BoardTime) -> None:
        """Add what a board did."""
        with self._lock:
            for table in (self._times, self._since):
                table[name] = table.get(name, BoardTime()) + time_

    def is_valid(self, name: str, state: BoardState) -> bool:
        """Whether a board was at speed just after a measurement."""
        if state.throttled:
            return False
        with self._lock:
            now, top = state.frequencies_khz, self._top.get(name, ())
            if len(now) != len(top):
                self._top[name] = now
                return True
            self._top[name] = tuple(max(pair) for pair in zip(now, top, strict=True))
            # A governor may leave idle CPUs slow: it is the fastest that ran the kernel.
            return not now or max(now) >= SLOWER * max(self._top[name])

    def times(self) -> dict[str, BoardTime]:
        """What each board did."""
        with self._lock:
            return dict(self._times)

    def take(self) -> dict[str, BoardTime]:
        """What each board did since this was last asked."""
        with self._lock:
            since, self._since = self._since, {}
            return since
