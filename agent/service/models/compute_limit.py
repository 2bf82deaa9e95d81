"""How long a worker may compute one request, measured with one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ComputeLimit:
    """A limit that begins again with each request that a process computes.

    `on_over` is called once when it has computed for longer; the owner ends the process then.
    """

    def __init__(self, limit_s: float, is_computing: Callable[[], bool], on_over: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._is_computing = is_computing
        self._on_over = on_over
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = 0.0
        self._over = False

    def begin(self) -> None:
        """Note that the process begins to compute another request; this only moves the start of the time."""
        self._since_s = _now_s()
        if self._timer is None:
            self._wait(self._limit_s)

    def end(self) -> bool:
        """Note that the process is gone; return whether the limit was exceeded."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        over, self._over = self._over, False
        return over

    def _wait(self, left_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(left_s, self._check)

    def _check(self) -> None:
        """Tell the owner if the limit is exceeded; check again later if not."""
        self._timer = None
        if not self._is_computing():
            return
        left_s = self._since_s + self._limit_s - _now_s()
        if left_s > 0:
            self._wait(left_s)
            return
        self._over = True
        self._on_over()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
