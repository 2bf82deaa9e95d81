"""How a bundle has done since it was put into service: answers, failures of the model, and its speed.

Promises: what a client did wrong (400, 415, a deadline that passed) does not count.
Leaves to others: what follows from it (`agent.deploy.trial`).
"""

from __future__ import annotations

from collections import deque
from typing import Final

from agent.deploy.trial import Score
from agent.worker.frames import Answer

# Enough for a 95th percentile that one slow answer does not move.
_KEEP_DURATIONS: Final = 1024
_OK: Final = 200
_MODEL_FAILED: Final = 500
_PERCENTILE: Final = 0.95


class TrackRecord:
    """The answers of one bundle."""

    def __init__(self) -> None:
        self._answers = 0
        self._errors = 0
        self._computed_us: deque[int] = deque(maxlen=_KEEP_DURATIONS)

    def answered(self, answer: Answer) -> None:
        """Count an answer of the worker."""
        if answer.status == _OK:
            self._answers += 1
            self._computed_us.append(answer.decode_us + answer.compute_us + answer.encode_us)
        elif answer.status == _MODEL_FAILED:
            self.failed()

    def failed(self) -> None:
        """Count a request that failed, or that ended the worker."""
        self._answers += 1
        self._errors += 1

    def score(self) -> Score:
        """Return the numbers."""
        ordered = sorted(self._computed_us)
        p95_s = ordered[int(_PERCENTILE * (len(ordered) - 1))] / 1e6 if ordered else None
        return Score(answers=self._answers, errors=self._errors, p95_s=p95_s)
