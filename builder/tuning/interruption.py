"""Ctrl-C where it does no harm.

TVM ends the whole process when an exception, and be it KeyboardInterrupt, leaves a Python function that C++
called. So while a run goes on, the first Ctrl-C is only remembered, and raised where nothing is under way;
the second is raised at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interruption:
    """Remembers a Ctrl-C."""

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """Raise what came.

        Raises
        ------
        KeyboardInterrupt
            If somebody pressed Ctrl-C.
        """
        if self._came:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: object) -> None:
        del number, frame
        if self._came:
            raise KeyboardInterrupt
        self._came = True


@contextlib.contextmanager
def deferred() -> Iterator[Interruption]:
    """While this lasts, Ctrl-C waits for `Interruption.check`; nothing changes outside the main thread."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption._handle)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
