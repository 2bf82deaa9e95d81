from __future__ import annotations

import numpy as np
import pytest

from builder.tuning.verdicts.paired_timing import ratio_of


def test_a_real_gain_is_seen_despite_shared_noise() -> None:
    noise = np.random.default_rng(1).uniform(1, 3, 21)
    ratio = ratio_of([(1.2 * n, 1.0 * n) for n in noise])
    assert ratio.speedup == pytest.approx(1.2, rel=1e-5)
    assert ratio.low > 1.1
    assert ratio.pairs == 21


def test_equal_times_are_no_gain_beyond_doubt() -> None:
    generator = np.random.default_rng(2)
    ratio = ratio_of([tuple(generator.normal(1.0, 0.05, 2)) for _ in range(21)])
    assert ratio.low < 1.0 < ratio.high


def test_one_outlier_does_not_make_a_gain() -> None:
    ratio = ratio_of([(1.0, 1.0)] * 20 + [(50.0, 1.0)])
    assert (ratio.speedup, ratio.low) == (1.0, 1.0)


def test_the_same_pairs_give_the_same_interval() -> None:
    pairs = [(1.0 + i / 10, 1.1) for i in range(11)]
    assert ratio_of(pairs) == ratio_of(pairs)


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pair"):
        ratio_of([])
