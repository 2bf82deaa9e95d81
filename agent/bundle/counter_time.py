"""Security counters and the time: which counters may become the least that a device accepts.

A counter only rises, so one that is far too high locks out every later build of its model, for ever. Counters
are seconds since 1970 unless a person chooses smaller ones, so an honest one is hardly ahead of time.

Promises a decision from its arguments only. Leaves to others: what time it is (`agent.clock`).
"""

from __future__ import annotations

import time
from typing import Final

# The clock of the machine that built the bundle may be ahead by this much.
MAX_AHEAD_S: Final = 2 * 86_400
# 2100-01-01. A device whose clock may be years behind, or will never be set, must still take honest bundles.
# It refuses milliseconds, and what leaves no room.
LATEST_WITHOUT_CLOCK: Final = 4_102_444_800
# What to do about a counter that is ahead of time.
AHEAD_HINT: Final = "leave out --security-counter, or add --counter-ahead-of-time if it is meant"


def highest_counter(now_s: float, *, synchronised: bool) -> int:
    """Return the highest counter that is not ahead of time.

    Parameters
    ----------
    now_s
        The time in seconds since 1970.
    synchronised
        Whether that is known to be right.
    """
    highest = int(now_s) + MAX_AHEAD_S
    return highest if synchronised else max(highest, LATEST_WITHOUT_CLOCK)


def day_of(counter: int) -> str:
    """Return the day of a counter that is seconds since 1970, such as `2026-11-29`."""
    return time.strftime("%Y-%m-%d", time.gmtime(counter))
