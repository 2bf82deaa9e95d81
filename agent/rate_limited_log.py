"""Rate-limited logging: at most one line of each kind in an interval, to spare the device's SD card."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable


class RateLimitedLog:
    """Logs one line of each kind in an interval, and drops the others.

    Parameters
    ----------
    logger
        Where the lines go.
    interval_s
        Seconds between two lines of one kind.
    clock
        Returns seconds; `time.monotonic` except in tests.
    """

    def __init__(
        self, logger: logging.Logger, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._clock = clock
        self._logged_s: dict[Hashable, float] = {}

    def due(self, kind: Hashable = "") -> bool:
        """Return whether a line of this kind may be logged now; if so, it counts as logged."""
        now_s = self._clock()
        if now_s - self._logged_s.get(kind, float("-inf")) < self._interval_s:
            return False
        self._logged_s[kind] = now_s
        return True

    def error(self, text: str, *arguments: object) -> None:
        """Log an error if it is due."""
        if self.due():
            self._logger.error(text, *arguments)
