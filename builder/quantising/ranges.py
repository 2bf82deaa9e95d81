"""Ranges of activations: which interval of a tensor's values 256 levels should cover.

Candidates are the smallest and largest value seen, percentiles, the interval of least divergence, and shrunk
intervals; the one with the least mean squared error on the histogram is taken. Works only on histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BINS: Final = 8192  # 32 for each level: a tensor's tail may be 30 times as long as its bulk
LEVELS: Final = 255  # steps from the smallest to the largest of 256 levels
# A product of two scales must stay a normal float32, which ends at 2^-126.
SMALLEST_SCALE: Final = 2.0**-60
# Shares of values that are clipped at each end.
_PERCENTILES: Final = {"percentile 99.99": 1e-4, "percentile 99.999": 1e-5}
_SHRINK_STEPS: Final = 24
_SHRINK_TO: Final = 0.25
_DIVERGENCE_MERGE: Final = 4  # bins that the divergence puts into one: 2048 bins, as is usual


@dataclass(frozen=True, slots=True)
class Histogram:
    """The values of a tensor over all samples.

    `low`, `high`: the smallest and the largest value, with 0 in between or at an end.
    `counts`: shape [BINS], int64: how many values are in each of equal bins from `low` to `high`. Zeros,
        which are always represented exactly, are not counted.
    """

    low: float
    high: float
    counts: NDArray[np.int64]

    @property
    def centres(self) -> NDArray[np.float64]:
        """Shape [BINS]: the middle of each bin."""
        width = (self.high - self.low) / len(self.counts)
        places = np.arange(len(self.counts), dtype=np.float64) + 0.5
        return np.asarray(self.low + places * width, np.float64)


@dataclass(frozen=True, slots=True)
class Range:
    """The interval that the levels cover; it includes 0.

    `method`: how it was found, such as `min-max`.
    """

    low: float
    high: float
    method: str = "min-max"

    @property
    def width(self) -> float:
        """`high` minus `low`."""
        return self.high - self.low

    def union(self, other: Range) -> Range:
        """The smallest range that includes both; its method is that of the wider one."""
        wider = self if self.width >= other.width else other
        return Range(min(self.low, other.low), max(self.high, other.high), wider.method)


@dataclass(frozen=True, slots=True)
class Levels:
    """ONNX's linear quantisation of a tensor: value = (level - zero_point) * scale.

    `scale`: the distance of two levels, a float32.
    `zero_point`: the level of 0, from 0 to 255; 128 less for int8.
    """

    scale: np.float32
    zero_point: int

    @property
    def low(self) -> float:
        """The value of the lowest level."""
        return -self.zero_point * float(self.scale)

    @property
    def high(self) -> float:
        """The value of the highest level."""
        return (LEVELS - self.zero_point) * float(self.scale)


def levels_of(chosen: Range) -> Levels:
    """The levels that cover a range.

    A tensor that is 0 in every sample gets the range from 0 to 1.
    """
    low, high = (chosen.low, chosen.high) if chosen.width > 0 else (0.0, 1.0)
    scale = np.float32(max((high - low) / LEVELS, SMALLEST_SCALE))
    return Levels(scale, int(np.clip(np.rint(-low / float(scale)), 0, LEVELS)))


def choose(histogram: Histogram) -> Range:
    """The candidate of the least squared error; of equal ones, the widest."""
    widest = Range(histogram.low, histogram.high)
    if not histogram.counts.any():
        return widest
    best, least = widest, squared_error(histogram, widest)
    for candidate in _candidates(histogram):
        error = squared_error(histogram, candidate)
        if error < least:
            best, least = candidate, error
    return best


def squared_error(histogram: Histogram, candidate: Range) -> float:
    """The sum of squared errors if the levels cover `candidate`."""
    used = np.flatnonzero(histogram.counts)
    values, counts = histogram.centres[used], histogram.counts[used]
    levels = levels_of(candidate)
    scale = float(levels.scale)
    steps = np.clip(np.rint(values / scale) + levels.zero_point, 0, LEVELS) - levels.zero_point
    return float(np.sum(counts * (values - steps * scale) ** 2))


def _candidates(histogram: Histogram) -> list[Range]:
    candidates = []
    total = np.cumsum(histogram.counts)
    width = (histogram.high - histogram.low) / len(histogram.counts)
    for name, share in _PERCENTILES.items():
        first = int(np.searchsorted(total, share * total[-1], side="right"))
        last = int(np.searchsorted(total, (1 - share) * total[-1], side="left"))
        low, high = histogram.low + first * width, histogram.low + (last + 1) * width
        candidates.append(Range(min(low, 0.0), max(min(high, histogram.high), 0.0), name))
    shrunk = _shrunk(histogram)
    if shrunk:
        divergences = [_divergence(histogram, candidate) for candidate in shrunk]
        least = shrunk[int(np.argmin(divergences))]
        candidates.append(Range(least.low, least.high, "entropy"))
    return candidates + shrunk


def _shrunk(histogram: Histogram) -> list[Range]:
    """Both ends, or one of them, moved towards 0."""
    found = []
    for factor in np.linspace(1.0, _SHRINK_TO, _SHRINK_STEPS + 1)[1:].tolist():
        low, high = histogram.low * factor, histogram.high * factor
        found.append(Range(low, high, "MSE"))
        if low < 0 < high:
            found += [Range(histogram.low, high, "MSE"), Range(low, histogram.high, "MSE")]
    return found


def _divergence(histogram: Histogram, candidate: Range) -> float:
    """Kullback and Leibler's divergence of the clipped values from their quantised form.

    As in TensorRT's calibration (S. Migacz, 8-bit inference with TensorRT, 2017), for ranges with two ends:
    what is beyond an end is counted at that end, and each level's values are spread over its bins.
    """
    counts = histogram.counts.reshape(-1, _DIVERGENCE_MERGE).sum(axis=1).astype(np.float64)
    centres = histogram.centres.reshape(-1, _DIVERGENCE_MERGE).mean(axis=1)
    inside = np.flatnonzero((centres >= candidate.low) & (centres <= candidate.high))
    if not len(inside) or not counts[inside].any():
        return float("inf")
    first, last = int(inside[0]), int(inside[-1])
    kept = counts[first : last + 1]
    clipped = kept.copy()
    clipped[0] += counts[:first].sum()
    clipped[-1] += counts[last + 1 :].sum()
    levels = levels_of(candidate)
    steps = np.rint(centres[first : last + 1] / float(levels.scale)).astype(np.int64)
    steps -= steps[0]
    occupied = kept > 0
    totals = np.bincount(steps, weights=kept)
    bins = np.bincount(steps, weights=occupied.astype(np.float64))
    spread = np.where(occupied, totals[steps] / np.maximum(bins[steps], 1), 0.0)
    p, q = clipped / clipped.sum(), spread / max(spread.sum(), 1.0)
    seen = p > 0
    # A value that is only counted at an end has no quantised form in this bin: a small share, not none.
    return float(np.sum(p[seen] * np.log(p[seen] / np.maximum(q[seen], 1e-9))))
