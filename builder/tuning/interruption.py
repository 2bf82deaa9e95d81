"""Ctrl-C, deferred until it is safe.

TVM aborts the process if an exception, even KeyboardInterrupt, leaves a Python function that C++ has called.
So during a run, the first Ctrl-C is only remembered, and raised when no such call is active. A second one is
raised at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


class Interruption:
    """Remembers whether SIGINT has arrived."""

    def __init__(self) -> None:
        self._is_pending = False

    def check(self) -> None:
        """Raise KeyboardInterrupt if SIGINT has arrived.

        Raises `KeyboardInterrupt` if SIGINT has arrived.
        """
        if self._is_pending:
            raise KeyboardInterrupt

    def on_signal(self, number: int, frame: object) -> None:
        """Remember the first SIGINT, raise KeyboardInterrupt at the second; for `signal.signal`."""
        del number, frame
        if self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True


@contextlib.contextmanager
def deferred() -> Iterator[Interruption]:
    """Defer SIGINT to `Interruption.check` inside the block; does nothing outside the main thread."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    before = signal.signal(signal.SIGINT, interruption.on_signal)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, before)
