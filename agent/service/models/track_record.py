"""How a bundle has done since it was put into service: for each client, and how long each kind of work took.

Promises: a client's mistakes (400, 415, a deadline that passed) do not count. Only the computing of the graph
counts as time, because clients choose what is decoded and encoded, and only in the bucket and with the number
of threads that it was computed with, because clients choose the size, too. Each client has its own times: on
some values a graph computes for longer than on others.
Leaves to others: what follows from it (`agent.deploy.trial`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Final

from agent.deploy.trial import Score, Tally, Times, client_of, kind_of
from agent.worker.frames import NOT_COMPARABLE, Answer

# Enough for a 95th percentile that one slow answer does not move.
_KEEP_DURATIONS: Final = 512
# Buckets, numbers of threads and clients; those that come later are not timed.
_MAX_KINDS: Final = 32
_MAX_KINDS_OF_A_CLIENT: Final = 4
# A worker may say anything; more sizes than this do not change in one model.
_MAX_SIZES: Final = 8
# More clients than a device has; those that come later are counted as one.
_MAX_CLIENTS: Final = 64
_OTHERS: Final = ""
_OK: Final = 200
_MODEL_FAILED: Final = 500
_PERCENTILE: Final = 0.95


class TrackRecord:
    """The answers of one bundle."""

    def __init__(self) -> None:
        self._clients: dict[str, list[int]] = {}
        self._computed_us: dict[str, deque[int]] = {}
        self._names: dict[str, str] = {}
        self._hot = False

    def answered(self, answer: Answer, client: str, threads: int = 0) -> None:
        """Count an answer of the worker, which computed it with so many threads."""
        if answer.status == _OK:
            self._tally(client)[0] += 1
            if answer.bucket != NOT_COMPARABLE:
                bucket = "x".join(map(str, answer.bucket[:_MAX_SIZES]))
                self._time(f"{bucket}/{threads}", self._names.get(client, _OTHERS), answer.compute_us)
        elif answer.status == _MODEL_FAILED:
            self.failed(client)

    def failed(self, client: str) -> None:
        """Count a request that failed, or that ended the worker."""
        tally = self._tally(client)
        tally[0] += 1
        tally[1] += 1

    def _tally(self, client: str) -> list[int]:
        """Return the answers and errors of a client, under a digest of its name, which may be long."""
        key = self._names.get(client)
        if key is None:
            key = _OTHERS
            if len(self._names) < _MAX_CLIENTS:
                key = self._names[client] = hashlib.blake2b(client.encode(), digest_size=8).hexdigest()
        return self._clients.setdefault(key, [0, 0])

    def _time(self, work: str, client: str, compute_us: int) -> None:
        kind = kind_of(work, client)
        durations = self._computed_us.get(kind)
        if durations is None:
            of_client = sum(client_of(known) == client for known in self._computed_us)
            if len(self._computed_us) >= _MAX_KINDS or of_client >= _MAX_KINDS_OF_A_CLIENT:
                return
            durations = self._computed_us[kind] = deque(maxlen=_KEEP_DURATIONS)
        durations.append(compute_us)

    def score(self, others: tuple[str, ...] = (), *, hot: bool = False) -> Score:
        """Return the numbers, and what else the speed depends on: other models, and heat."""
        self._hot = self._hot or hot
        return Score(
            clients={key: Tally(*tally) for key, tally in self._clients.items()},
            times={kind: _times(durations) for kind, durations in self._computed_us.items()},
            others=others,
            hot=self._hot,
        )


def _times(durations: deque[int]) -> Times:
    ordered = sorted(durations)
    return Times(len(ordered), ordered[int(_PERCENTILE * (len(ordered) - 1))] / 1e6)
