"""Weights of nine bits as bytes and a constant for each channel."""

from __future__ import annotations

import numpy as np
import pytest

from builder.calls.byte_weights import ByteWeights


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("zero", [0, 1, 100, 128, 200, 255])
def test_any_zero_point_of_a_byte_fits(axis: int, zero: int) -> None:
    codes = np.tile(np.arange(256), (3, 1)) if axis == 0 else np.tile(np.arange(256), (3, 1)).T
    weights = codes - zero
    parts = ByteWeights.of(weights, axis)
    assert parts is not None
    assert parts.numbers.dtype == np.int8
    moved = parts.moved.reshape((-1, 1) if axis == 0 else (1, -1))
    assert np.array_equal(parts.numbers.astype("i8") + moved, weights)
    assert np.array_equal(parts.total, weights.sum(1 - axis))


def test_weights_that_fit_are_not_moved() -> None:
    parts = ByteWeights.of(np.array([[-128, 127], [0, 0]]), 0)
    assert parts is not None
    assert not parts.moved.any()


def test_channels_are_moved_separately() -> None:
    parts = ByteWeights.of(np.array([[-128, 127], [1, 200], [-200, -1]]), 0)
    assert parts is not None
    assert parts.moved.tolist() == [0, 73, -72]


def test_weights_that_span_more_than_a_byte_are_refused() -> None:
    assert ByteWeights.of(np.array([[-128, 128]]), 0) is None
