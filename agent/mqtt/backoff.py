"""How long to wait before the next attempt to connect.

A core without a clock of its own. Delays double, with jitter so that a fleet does not come back at once
after its broker was away; a connection that did not stand for long counts as a failure too, or two agents
with one name would throw each other out as fast as the broker lets them.
"""

from __future__ import annotations

import random
from typing import Final

from agent.mqtt.reason_codes import Action, Reason

FIRST_S: Final = 0.1
LONGEST_S: Final = 30.0
# Somebody has to change something first.
LATER_S: Final = 60.0
# After this long, what ended a connection has nothing to do with making it.
SETTLED_S: Final = 2.0
# A broker that is restarted again and again is worth coming back to sooner than one that is away. Not above
# `SETTLED_S`, or the two agents would take each other's absence for peace.
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

    def ended(self, stood_s: float) -> None:
        """Count a connection that is gone after `stood_s`."""
        self.failures = 0 if stood_s >= SETTLED_S else self.failures + 1
        self._longest_s = LONGEST_UNSETTLED_S

    def delay_s(self, why: Reason) -> float:
        """Return the pause before the next attempt, given the reason of the last failure."""
        if why.connecting is Action.LATER:
            return LATER_S * random.uniform(1.0, 1.5)  # noqa: S311 - jitter, no secret
        doubled_s = FIRST_S * 2.0 ** min(self.failures, 16)
        return min(self._longest_s, doubled_s) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret
