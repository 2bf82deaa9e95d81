"""How a bundle has done since it was put into service: answers, failures of the model, and its speed.

Promises: a client's mistakes (400, 415, a deadline that passed) do not count. No client can end a trial for
all: the failures of the client with the most are left out, unless no other client asks. A request can fail
because of what it asks for (JSON that is too large, NaN as JSON, inputs that end a worker), and would have
failed with the predecessor too. Only the computing of the graph counts as time, because clients choose what
is decoded and encoded.
Leaves to others: what follows from it (`agent.deploy.trial`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from agent.deploy.trial import Score
from agent.worker.frames import Answer

# Enough for a 95th percentile that one slow answer does not move.
_KEEP_DURATIONS: Final = 1024
# More clients than a device has; those that come later are counted as one.
_MAX_CLIENTS: Final = 64
_OTHERS: Final = 0
_OK: Final = 200
_MODEL_FAILED: Final = 500
_PERCENTILE: Final = 0.95


class TrackRecord:
    """The answers of one bundle."""

    def __init__(self) -> None:
        # By a hash of the client's name, which may be long.
        self._answers: dict[int, int] = {}
        self._errors: dict[int, int] = {}
        self._computed_us: deque[int] = deque(maxlen=_KEEP_DURATIONS)

    def answered(self, answer: Answer, client: str) -> None:
        """Count an answer of the worker."""
        if answer.status == _OK:
            self._count(client)
            self._computed_us.append(answer.compute_us)
        elif answer.status == _MODEL_FAILED:
            self.failed(client)

    def failed(self, client: str) -> None:
        """Count a request that failed, or that ended the worker."""
        key = self._count(client)
        self._errors[key] = self._errors.get(key, 0) + 1

    def _count(self, client: str) -> int:
        key = hash(client)
        if key not in self._answers and len(self._answers) >= _MAX_CLIENTS:
            key = _OTHERS
        self._answers[key] = self._answers.get(key, 0) + 1
        return key

    def score(self) -> Score:
        """Return the numbers."""
        ordered = sorted(self._computed_us)
        p95_s = ordered[int(_PERCENTILE * (len(ordered) - 1))] / 1e6 if ordered else None
        answers, errors = sum(self._answers.values()), sum(self._errors.values())
        if errors and len(self._answers) > 1:
            most = max(self._errors, key=lambda key: self._errors[key])
            answers -= self._answers[most]
            errors -= self._errors[most]
        return Score(answers=answers, errors=errors, p95_s=p95_s)
