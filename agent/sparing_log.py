"""A fault that comes again and again is logged once in a while: a log is on an SD card, too."""

from __future__ import annotations

import logging
import time
from collections.abc import Hashable


class SparingLog:
    """Logs one line of each kind in an interval, and leaves out the others.

    Parameters
    ----------
    logger
        Where to.
    interval_s
        Seconds between two lines of a kind.
    """

    def __init__(self, logger: logging.Logger, interval_s: float) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._logged_s: dict[Hashable, float] = {}

    def due(self, kind: Hashable = "") -> bool:
        """Whether a line of this kind may be logged now; it counts as logged then."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(kind, float("-inf")) < self._interval_s:
            return False
        self._logged_s[kind] = now_s
        return True

    def error(self, text: str, *arguments: object) -> None:
        """Log an error, if it is due."""
        if self.due():
            self._logger.error(text, *arguments)
