"""Levels of four bits."""

from __future__ import annotations

import numpy as np
import pytest

from builder.quantising.block_levels import HIGHEST, LOWEST, quantise_blocks


@pytest.mark.parametrize(("shape", "axis", "block"), [((64, 5), 0, 32), ((3, 50), 1, 16), ((7, 1), 0, 32)])
def test_the_error_is_at_most_that_of_the_largest_weight(
    shape: tuple[int, int], axis: int, block: int
) -> None:
    weight = np.random.default_rng(0).standard_normal(shape).astype("f4")
    codes, scales = quantise_blocks(weight, axis, block)
    assert codes.dtype == np.int8
    assert codes.min() >= LOWEST
    assert codes.max() <= HIGHEST
    assert np.array_equal(scales, scales.astype("f2").astype("f4"))
    places = np.arange(shape[axis]) // block
    error = codes * np.take(scales, places, axis) - weight
    starts = np.arange(0, shape[axis], block)
    largest = np.maximum.reduceat(np.abs(weight), starts, axis)
    naive = np.take((largest / HIGHEST).astype("f2").astype("f4"), places, axis)
    plain = np.clip(np.rint(weight / naive), LOWEST, HIGHEST) * naive - weight
    assert np.all(np.add.reduceat(error**2, starts, axis) <= np.add.reduceat(plain**2, starts, axis) + 1e-9)


def test_numbers_at_the_limits() -> None:
    """Zeros, denormal numbers, and weights beyond what a scale in float16 can reach."""
    weight = np.zeros((3, 32), "f4")
    weight[1] = 1e-40
    weight[2] = 3e5
    codes, scales = quantise_blocks(weight, 1, 32)
    assert not codes[:2].any()
    assert np.isfinite(scales).all()
    assert scales.min() > 0
    assert np.allclose(codes[2] * scales[2], 3e5, rtol=1e-2)
