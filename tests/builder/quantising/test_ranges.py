"""Ranges: the best of the candidates, with 0 always among the levels."""

from __future__ import annotations

import numpy as np
import pytest

from builder.quantising.ranges import BINS, SMALLEST_SCALE, Histogram, Range, choose, levels_of, squared_error
from tests.builder.quantising.networks import Array


def histogram(values: Array) -> Histogram:
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    counts, _ = np.histogram(values[values != 0], BINS, (low, high))
    return Histogram(low, high, counts.astype(np.int64))


def true_error(values: Array, chosen: Range) -> float:
    levels = levels_of(chosen)
    steps = np.clip(np.rint(values / levels.scale) + levels.zero_point, 0, 255) - levels.zero_point
    return float(np.mean((values - steps * levels.scale) ** 2))


RNG = np.random.default_rng(3)
DISTRIBUTIONS = {
    "uniform": RNG.uniform(-1, 3, 40_000),
    "normal": RNG.standard_normal(40_000),
    "relu": np.maximum(RNG.standard_normal(40_000), 0),
    "laplace": RNG.laplace(size=40_000),
    "heavy tail": RNG.standard_t(2.5, 40_000),
    "one outlier": np.append(RNG.standard_normal(40_000), 60.0),
    "negative": -RNG.exponential(size=40_000),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_chosen_range_is_as_good_as_any_on_the_values_themselves(name: str) -> None:
    values = DISTRIBUTIONS[name]
    found = histogram(values)
    chosen = choose(found)
    shrunk = [Range(found.low * f, found.high * f) for f in np.linspace(0.3, 1, 36)]
    assert true_error(values, chosen) <= 1.03 * min(true_error(values, other) for other in shrunk)
    assert found.low <= chosen.low <= 0 <= chosen.high <= found.high


def test_uniform_values_keep_their_whole_range_and_long_tails_do_not() -> None:
    assert choose(histogram(DISTRIBUTIONS["uniform"])).width > 3.9
    found = histogram(DISTRIBUTIONS["laplace"])
    assert choose(found).width < 0.95 * (found.high - found.low)
    assert choose(found).method != "min-max"


def test_error_on_the_histogram_is_that_on_the_values() -> None:
    values = DISTRIBUTIONS["laplace"]
    found = histogram(values)
    for candidate in (Range(found.low, found.high), Range(-4, 4), Range(-1, 6)):
        measured = squared_error(found, candidate) / len(values)
        assert measured == pytest.approx(true_error(values, candidate), rel=0.05)


@pytest.mark.parametrize(
    "ends", [(-1.0, 3.0), (0.0, 6.0), (-5.0, 0.0), (-1e-3, 1e4), (-1e-40, 1e-40), (0.0, 0.0)]
)
def test_zero_is_a_level_and_the_ends_are_covered(ends: tuple[float, float]) -> None:
    levels = levels_of(Range(*ends))
    assert 0 <= levels.zero_point <= 255
    assert levels.scale >= SMALLEST_SCALE
    assert np.isfinite(1 / levels.scale)
    assert levels.low <= 0 <= levels.high
    assert levels.low <= ends[0] + 0.501 * levels.scale
    assert levels.high >= ends[1] - 0.501 * levels.scale


def test_empty_histogram_keeps_its_ends() -> None:
    assert choose(Histogram(0.0, 0.0, np.zeros(BINS, np.int64))) == Range(0.0, 0.0)
