"""How long to wait before the next attempt to connect.

A core without a clock. A client of a fleet has slots: moments that recur at a fixed interval, at an offset
that it drew at random. It tries to connect once in each slot and at no other time. So however long a broker
was away, its clients come back evenly spread over one interval, and a broker that is missing or overloaded
never gets more attempts than that (docs/decisions/0018). A client that is not part of a fleet, such as a
command line, has no slots: its delays double, with jitter.

A connection that ended soon after it came up counts as a failure too: otherwise two agents with one name
would evict each other as fast as the broker allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from agent.mqtt.reason_codes import RENEWED, Action, Reason

FIRST_S: Final = 0.1
LONGEST_S: Final = 30.0
# Someone must change something first.
LATER_S: Final = 60.0
# A connection that lasted this long was good: it did not end because of how it was made.
SETTLED_S: Final = 2.0
# Retry sooner after a connection that ended than after one that was never made: the broker may only be
# restarting. Not above `SETTLED_S`, or two agents with one name would look settled while the other waits.
LONGEST_UNSETTLED_S: Final = 2.0
# A slot that begins sooner than this is left to the next one: it may be the slot of the attempt that has just
# failed, for a timer may fire a moment early.
_SAME_SLOT_S: Final = 0.05


class Backoff:
    """The attempts of one connection; without `spread_s`, it has no slots.

    While attempts fail, the interval of the slots doubles as long as it stays within `LONGEST_S`. `draw`
    returns a random number from 0 to 1: where in the interval they are.
    """

    def __init__(self, spread_s: float = 0.0, draw: Callable[[], float] = random.random) -> None:
        self.failures = 0
        self._longest_s = LONGEST_S
        self._spread_s = spread_s
        self._offset = draw()

    def failed(self) -> None:
        """Count an attempt that made no connection."""
        self.failures += 1
        self._longest_s = LONGEST_S

    def ended(self, lasted_s: float) -> None:
        """Count the end of a connection that lasted `lasted_s`."""
        self.failures = 0 if lasted_s >= SETTLED_S else self.failures + 1
        self._longest_s = LONGEST_UNSETTLED_S

    def delay_s(self, why: Reason, now_s: float) -> float:
        """Return the pause before the next attempt; the clock of `now_s` never goes backwards."""
        if why.connecting is Action.LATER:
            return LATER_S * random.uniform(1.0, 1.5)  # noqa: S311 - jitter, not a secret
        # Renewing the certificates is our own doing, and no other client does it at the same moment.
        if self._spread_s and why is not RENEWED:
            return self._next_slot_s(now_s)
        doubled_s = FIRST_S * 2.0 ** min(self.failures, 16)
        return min(self._longest_s, doubled_s) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret

    def _next_slot_s(self, now_s: float) -> float:
        interval_s = self._spread_s
        for _ in range(min(self.failures, 16)):
            if 2 * interval_s <= LONGEST_S:
                interval_s *= 2
        left_s = (self._offset * interval_s - now_s) % interval_s
        return left_s if left_s >= min(_SAME_SLOT_S, interval_s / 2) else left_s + interval_s
