"""Compares a worker's processor time with what its requests explain.

The kernel's limit of processor time (RLIMIT_CPU) sends a signal that a hostile model can block, and the agent
has no right to renew a limit that kills. So the agent compares: a worker computes while it has requests, each
of which has its own limit, and otherwise waits. A worker that uses processor time without a request has a
model that goes on computing in a thread of its own.

This module has only arithmetic: no clock, no files.
"""

from __future__ import annotations

from typing import Final

# After each launch of a kernel its threads stay awake for half a millisecond, the last time after the answer.
_AFTER_REQUEST_S: Final = 0.001
# Tolerance: the share of one processor that a process may use without a request.
_FORGIVEN: Final = 0.05


class ProcessorMeter:
    """One worker's processor time, from the moment when it is ready: what it used before was loading."""

    def __init__(self, now_s: float, used_s: float) -> None:
        self._now_s = now_s
        self._used_s = used_s
        self._unexplained_s = 0.0

    def feed(self, now_s: float, used_s: float, *, busy_s: float, requests: int, processors: int) -> float:
        """Take a reading, and return the processor seconds that no request explains.

        Since the reading before, the process had at least one request for `busy_s`, and has answered so many.
        It may run on so many `processors`.
        """
        explained_s = processors * (busy_s + requests * _AFTER_REQUEST_S)
        forgiven_s = _FORGIVEN * (now_s - self._now_s)
        more_s = used_s - self._used_s - explained_s - forgiven_s
        self._now_s, self._used_s = now_s, used_s
        self._unexplained_s = max(0.0, self._unexplained_s + more_s)
        return self._unexplained_s
