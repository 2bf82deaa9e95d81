"""An event loop whose clock stands still while the machine does.

A thousand agents in one process are late together when that process does not get its processor, and make up
for it together in the next moment; a thousand devices would not. Therefore the loop's clock leaves out the
time for which the process neither computed nor waited.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Final

# Shorter delays cause no rush: 107 connects in a second are 3 in this time.
_TOLERATED_S: Final = 0.03


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.lost_s = 0.0
        self._resumed_s = time.monotonic()
        self._resumed_cpu_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        before_s = time.monotonic()
        self._lose(before_s - self._resumed_s - (time.thread_time() - self._resumed_cpu_s))
        events: list[tuple[selectors.SelectorKey, int]] = super().select(timeout)
        self._resumed_s = time.monotonic()
        self._resumed_cpu_s = time.thread_time()
        if timeout is not None:
            self._lose(self._resumed_s - before_s - max(0.0, timeout))
        return events

    def _lose(self, seconds: float) -> None:
        if seconds > _TOLERATED_S:
            self.lost_s += seconds


class SteadyLoop(asyncio.SelectorEventLoop):
    """The loop; run one with `asyncio.Runner(loop_factory=SteadyLoop)`."""

    def __init__(self) -> None:
        self._steady = _Selector()
        super().__init__(self._steady)

    @property
    def lost_s(self) -> float:
        """How long the machine has stood still so far."""
        return self._steady.lost_s

    def time(self) -> float:
        """Return the time by the loop's clock in seconds."""
        return time.monotonic() - self._steady.lost_s
