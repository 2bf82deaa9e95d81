"""A model's throughput and latency over time: the last hour or so, in memory that is bounded.

Promises: `LENGTH` points of 32 bytes for each model that publishes metrics, made when the first one arrives.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Final

from dashboard.sample import ModelSample

# An hour at the agents' default of one document every ten seconds.
LENGTH: Final = 360
_FIELDS: Final = 4
_MEDIAN: Final = 0.5
_TAIL: Final = 0.99


class Series:
    """Points in time, the oldest of which are overwritten."""

    def __init__(self) -> None:
        self._values = array("d")
        self._next = 0

    def add(self, time_s: float, sample: ModelSample) -> None:
        """Add a point; `time_s` is this machine's time, because the clocks of devices differ."""
        quantiles = dict(sample.quantiles)
        point = (time_s, sample.throughput, quantiles.get(_MEDIAN), quantiles.get(_TAIL))
        numbers = array("d", (math.nan if value is None else value for value in point))
        if len(self._values) < LENGTH * _FIELDS:
            self._values.extend(numbers)
        else:
            at = self._next * _FIELDS
            self._values[at : at + _FIELDS] = numbers
        self._next = (self._next + 1) % LENGTH

    def points(self) -> Iterator[list[float | None]]:
        """Yield points from old to new: time, answers a second, p50 and p99 in seconds; None if unknown."""
        count = len(self._values) // _FIELDS
        first = self._next if count == LENGTH else 0
        for i in range(count):
            at = (first + i) % count * _FIELDS
            yield [None if math.isnan(value) else value for value in self._values[at : at + _FIELDS]]
