"""How long to wait before the next attempt to connect.

A core without a clock. Delays double, with jitter so that a fleet does not reconnect all at once after its
broker was away. A connection that ended soon after it came up counts as a failure too: otherwise two agents
with one name would evict each other as fast as the broker allows.
"""

from __future__ import annotations

import random
from typing import Final

from agent.mqtt.reason_codes import Action, Reason

FIRST_S: Final = 0.1
LONGEST_S: Final = 30.0
# Someone must change something first.
LATER_S: Final = 60.0
# A connection that lasted this long was good: it did not end because of how it was made.
SETTLED_S: Final = 2.0
# Retry sooner after a connection that ended than after one that was never made: the broker may only be
# restarting. Not above `SETTLED_S`, or two agents with one name would look settled while the other waits.
LONGEST_UNSETTLED_S: Final = 2.0


class Backoff:
    """The attempts of one connection."""

    def __init__(self) -> None:
        self.failures = 0
        self._longest_s = LONGEST_S

    def failed(self) -> None:
        """Count an attempt that made no connection."""
        self.failures += 1
        self._longest_s = LONGEST_S

    def ended(self, lasted_s: float) -> None:
        """Count the end of a connection that lasted `lasted_s`."""
        self.failures = 0 if lasted_s >= SETTLED_S else self.failures + 1
        self._longest_s = LONGEST_UNSETTLED_S

    def delay_s(self, why: Reason) -> float:
        """Return the pause before the next attempt, given the reason of the last failure."""
        if why.connecting is Action.LATER:
            return LATER_S * random.uniform(1.0, 1.5)  # noqa: S311 - jitter, not a secret
        doubled_s = FIRST_S * 2.0 ** min(self.failures, 16)
        return min(self._longest_s, doubled_s) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret
