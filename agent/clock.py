"""What time it is, as far as this device knows.

Promises no answer from the network, and to change nothing: it reads the clock, the time of the agent's build,
and whether something keeps the clock right. Leaves what follows from the time to those who ask.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import agent

# systemd-timesyncd makes it when it has set the clock. The agent's unit may not call adjtimex(2).
_TIMESYNCD: Final = Path("/run/systemd/timesync/synchronized")
# adjtimex(2): returned for a clock that is not synchronised.
_TIME_ERROR: Final = 5


def built_s() -> float:
    """Return when the agent was built or, without a package, installed, in seconds since 1970."""
    return Path(agent.__file__).stat().st_mtime


def now_s() -> float:
    """Return the time in seconds since 1970; no earlier than the agent's build, whatever the clock says."""
    return max(time.time(), built_s())


def is_synchronised(*, marker: Path = _TIMESYNCD, state: int | None = None) -> bool:
    """Return whether the clock is known to be synchronised.

    Parameters
    ----------
    marker
        The file of systemd-timesyncd.
    state
        The result of adjtimex(2); by default it is called.
    """
    if marker.exists():
        return True
    state = _state() if state is None else state
    return 0 <= state != _TIME_ERROR


def _state() -> int:
    import ctypes

    # struct timex with modes = 0 changes nothing; it fits into 512 bytes on every architecture.
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except (OSError, AttributeError):
        return -1
