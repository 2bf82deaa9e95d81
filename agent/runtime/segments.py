"""Turn one result for each window into stretches of time: speech and words.

Promises the same stretches however a recording was cut into parts. Positions are in samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from agent.bundle.audio import Keywords, Speech
from agent.runtime.storage import Array

_MS: int = 1000


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of time, in samples from the beginning, and the number of its class, or -1.

    `score` is the best one of its windows, or 0.
    """

    start: int
    end: int
    label: int = -1
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class SpeechFinder:
    """Finds speech; each step returns a finder for what follows.

    The rule is `get_speech_timestamps` of Silero VAD (silero_vad/utils_vad.py, MIT) without its longest
    duration.

    `rate` is in samples a second, `start` where the speech that is going on began, and `quiet` where the
    silence began that may end it.
    """

    declared: Speech
    rate: int
    start: int | None = None
    quiet: int | None = None

    def push(self, position: int, probability: float) -> tuple[SpeechFinder, Segment | None]:
        """Take the probability of the window that begins at `position`."""
        declared, start, quiet = self.declared, self.start, self.quiet
        if probability >= declared.threshold:
            return replace(self, start=position if start is None else start, quiet=None), None
        if start is None or probability >= max(declared.threshold - declared.hysteresis, 0.01):
            return self, None
        quiet = position if quiet is None else quiet
        if position - quiet < self._samples(declared.min_silence_ms):
            return replace(self, quiet=quiet), None
        return replace(self, start=None, quiet=None), self._segment(start, quiet)

    def finish(self, length: int) -> Segment | None:
        """Return the speech that goes on until the end."""
        if self.start is None:
            return None
        found = self._segment(self.start, length)
        return None if found is None else replace(found, end=min(found.end, length))

    def _segment(self, start: int, end: int) -> Segment | None:
        if end - start <= self._samples(self.declared.min_speech_ms):
            return None
        pad = round(self._samples(self.declared.pad_ms))
        return Segment(max(0, start - pad), end + pad)

    def _samples(self, ms: int) -> float:
        return self.rate * ms / _MS


@dataclass(frozen=True, slots=True)
class WordFinder:
    """Joins windows with the same word; each step returns a finder for what follows.

    `open` is the word that is going on, and `recent` are the scores of the last windows, if a mean is
    declared: each float64, shape (classes,).
    """

    declared: Keywords
    open: Segment | None = None
    recent: tuple[Array, ...] = field(default=(), repr=False)

    def mean(self, scores: Array) -> tuple[WordFinder, Array]:
        """Return the mean of a window's scores and of those before it, as declared."""
        count = self.declared.average or 1
        if count == 1:
            return self, scores
        recent = (*self.recent, scores)[-count:]
        return replace(self, recent=recent), np.sum(recent, axis=0) / count

    def push(self, start: int, end: int, label: int, score: float) -> tuple[WordFinder, Segment | None]:
        """Take the best class of the window from `start` to `end`."""
        heard = score >= self.declared.threshold and label not in self.declared.ignore
        now = self.open
        if heard and now is not None and now.label == label:
            return replace(self, open=replace(now, end=end, score=max(now.score, score))), None
        return replace(self, open=Segment(start, end, label, score) if heard else None), now

    def finish(self, length: int) -> Segment | None:
        """Return the word that goes on until the end."""
        return None if self.open is None else replace(self.open, end=min(self.open.end, length))
