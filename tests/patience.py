"""How long tests wait for what must happen: one place, and no test has a number of its own.

A limit here is no claim. It is reached only when the code is wrong, so it is long enough for a virtual
machine that stands still for a second now and then, and for a laptop whose processors all have something else
to do. A claim about time belongs on an injected clock (`tests.virtual_time`), in processor time, in counted
steps, or in `least_s`; `tests/test_patience.py` refuses numbers anywhere else.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

# For a message, an answer, a thread, or a process that ends: half a minute of work on the slowest machine.
# Who breaks the code to see a test fail need not wait that long.
PATIENCE_S: Final = float(os.environ.get("EDGEBUNDLE_PATIENCE_S", "120"))

# For a program that compiles, tunes, installs or boots.
PROGRAM_PATIENCE_S: Final = 600.0

# How often a state is looked at that announces no change.
LOOK_S: Final = 0.002

# How often to measure what is promised about the wall clock; the first success is the last try.
TRIES: Final = 10


async def until(condition: Callable[[], object], limit_s: float = PATIENCE_S) -> None:
    """Return when a condition holds, on an event loop.

    Parameters
    ----------
    condition
        Is called again and again, every few milliseconds of the loop's clock.
    limit_s
        Seconds after which the wait is over.

    Raises
    ------
    TimeoutError
        If it still does not hold after `limit_s`.
    """
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(LOOK_S)


def wait_until(
    condition: Callable[[], bool],
    what: str | Callable[[], str] = "the condition holds",
    limit_s: float = PATIENCE_S,
) -> None:
    """Return when a condition holds, without an event loop.

    Parameters
    ----------
    condition
        Is called again and again, every few milliseconds.
    what
        What is waited for, or a function that says it with what is known at the end (a log).
    limit_s
        Seconds after which the wait is over.

    Raises
    ------
    AssertionError
        If it still does not hold after `limit_s`.
    """
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, (
            f"not within {limit_s:g} s: {what if isinstance(what, str) else what()}"
        )
        time.sleep(LOOK_S)


def least_s(measure: Callable[[], float], limit_s: float, tries: int = TRIES) -> float:
    """Return the shortest of some measurements, the first of which within a limit is the last.

    A promise about the wall clock is one about a machine that has time. A program that keeps it does so at
    the first try on such a machine, and at one of many on any other; one that breaks it never does.

    Parameters
    ----------
    measure
        Does what is promised, and returns how many seconds it took.
    limit_s
        The promise, in seconds.
    tries
        How often to measure at most.
    """
    found = float("inf")
    for _ in range(tries):
        found = min(found, measure())
        if found <= limit_s:
            break
    return found


async def least_s_async(measure: Callable[[], Awaitable[float]], limit_s: float, tries: int = TRIES) -> float:
    """Return what `least_s` does, of a measurement on an event loop."""
    found = float("inf")
    for _ in range(tries):
        found = min(found, await measure())
        if found <= limit_s:
            break
    return found
