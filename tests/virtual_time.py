"""An event loop whose clock jumps to the next timer when nothing else can happen, and otherwise stands still.

A test that runs on it needs no real time, however long its timers are, and cannot be too slow or too fast:
two events have the order of their times. It must not wait for other processes or threads, but for calls
in `agent.disk_thread`: the clock stands still until they return.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from agent.disk_thread import calls_under_way

P = ParamSpec("P")

START_S = 1000.0


class _Selector(selectors.DefaultSelector):
    """Returns at once, and tells the loop how long it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = []
        is_busy = True
        while is_busy and not events:
            # Asked before looking: a call wakes the loop before it is over.
            is_busy = calls_under_way() > 0
            events = super().select(0.001 if is_busy else 0)
        if events:
            return events
        if timeout is None:
            raise RuntimeError("the test waits for something that will never happen")
        self.skipped_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock of its own, which starts at `START_S`."""

    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return START_S + self._clock.skipped_s


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine on a `VirtualLoop`."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run


async def settle() -> None:
    """Let everything happen that can happen now, without any time passing."""
    for _ in range(20):
        await asyncio.sleep(0)
