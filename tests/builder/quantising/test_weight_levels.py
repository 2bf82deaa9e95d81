"""Weights in int8: each channel by itself, and no sum that leaves int32."""

from __future__ import annotations

import numpy as np
import pytest

from builder.kernels.spaces.dot_loops import fits_words
from builder.kernels.spaces.integer_convolution import pack_weights
from builder.quantising.weight_levels import _rows as as_rows
from builder.quantising.weight_levels import quantise_weights
from tests.builder.quantising.networks import Array


@pytest.fixture
def rng() -> np.random.Generator:
    """Of each test its own, so that their order does not matter."""
    return np.random.default_rng(5)


def largest_sum(levels: Array, bias: Array | None, axis: int) -> int:
    sums = 255 * np.abs(as_rows(levels, axis)).sum(axis=1)
    return int((sums + (0 if bias is None else np.abs(bias.astype(np.float64)))).max())


@pytest.mark.parametrize(
    ("shape", "axis"), [((8, 3, 3, 3), 0), ((16, 1, 5, 5), 0), ((32, 10), 1), ((10, 32), 0)]
)
def test_each_channel_has_its_own_scale(shape: tuple[int, ...], axis: int, rng: np.random.Generator) -> None:
    channels = shape[axis]
    sizes = np.logspace(-3, 2, channels).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    weight = (rng.standard_normal(shape) * sizes).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32)
    made = quantise_weights(weight, axis, bias, np.float32(0.02))
    wide = made.scales.reshape(sizes.shape)
    error = np.abs(made.weight * wide - weight)
    assert made.weight.shape == shape
    assert made.weight.min() >= -127
    clipped = np.abs(made.weight) == 127  # a channel may be clipped where that lessens its error
    assert (error <= 0.501 * wide)[~clipped].all()
    relative = np.sqrt((as_rows(error, axis) ** 2).mean(axis=1) / (as_rows(weight, axis) ** 2).mean(axis=1))
    assert relative.max() < 0.012
    assert made.bias is not None
    np.testing.assert_allclose(made.bias * made.bias_scales, bias, atol=0.51 * made.bias_scales.max())
    assert made.raised == 0


@pytest.mark.parametrize(
    ("weight", "bias", "input_scale"),
    [
        (np.full((2, 4), 1e-12), [1.0, 1.0], 1e-3),  # a bias of 1 in steps of 1e-17
        (np.zeros((2, 4)), [3.0, -5.0], 1e-6),  # dead channels
        (np.full((2, 200_000), 0.5), [1.0, -1.0], 0.1),  # a sum of 200 000 products
        (np.full((2, 4), 1e-38), [0.0, 0.0], 1e-12),
        (np.full((2, 4), 1e30), [1e30, -1e30], 1e4),
    ],
)
def test_no_sum_leaves_int32(weight: Array, bias: list[float], input_scale: float) -> None:
    given = np.asarray(bias, np.float32)
    made = quantise_weights(weight.astype(np.float32), 0, given, np.float32(input_scale))
    assert largest_sum(made.weight, made.bias, 0) < 2**31
    assert np.isfinite(made.bias_scales).all()
    assert (made.bias_scales > 0).all()
    assert made.bias is not None
    error = np.abs(made.bias * made.bias_scales.astype(np.float64) - given)
    assert (error <= 1e-6 * np.abs(given) + 0.5 * made.bias_scales).all()


@pytest.mark.parametrize(
    ("shape", "axis"), [((32, 48, 1, 1), 0), ((8, 20, 3, 2), 0), ((64, 24), 1), ((24, 64), 0)]
)
def test_sums_of_four_products_fit_16_bits_if_asked(
    shape: tuple[int, ...], axis: int, rng: np.random.Generator
) -> None:
    """As the kernels pack them; the steps of channels without large weights stay as they are."""
    weight = rng.uniform(-1, 1, shape).astype(np.float32)
    small = np.moveaxis(weight, axis, 0)[1]
    small *= 0.1
    small.flat[0] = 1.0

    def fits(levels: Array) -> bool:
        rows = np.moveaxis(levels, axis, 0).reshape(shape[axis], shape[1 - axis], *(shape[2:] or (1, 1)))
        return fits_words(pack_weights(rows, 16, 16, 1, 8))

    plain = quantise_weights(weight, axis, None, np.float32(0.1))
    made = quantise_weights(weight, axis, None, np.float32(0.1), in_words=True)
    assert (fits(plain.weight), plain.widened) == (False, 1.0)
    assert fits(made.weight)
    assert made.scales[1] == plain.scales[1]
    assert made.widened == pytest.approx((made.scales / plain.scales).mean())
    assert 1.3 < made.widened < 2.1  # four weights are at most 508 levels, 255 may be
    wide = np.expand_dims(made.scales, [i for i in range(len(shape)) if i != axis])
    assert np.abs(made.weight * wide - weight).max() <= 0.501 * made.scales.max()


def test_raised_scales_are_counted() -> None:
    weight = np.array([[1.0, -1.0], [1e-12, 1e-12]], np.float32)
    made = quantise_weights(weight, 0, np.array([1, 1], np.float32), np.float32(1e-3))
    assert made.raised == 1
    assert np.abs(made.weight[0]).max() == 127


def test_correction_is_subtracted_from_the_bias(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((3, 5)).astype(np.float32)
    plain = quantise_weights(weight, 0, None, np.float32(0.1))
    assert plain.bias is None
    made = quantise_weights(weight, 0, None, np.float32(0.1), np.array([0.5, 0.0, -0.25]))
    assert made.bias is not None
    np.testing.assert_allclose(made.bias * made.bias_scales, [-0.5, 0, 0.25], atol=made.bias_scales.max())


def test_outlier_is_clipped_if_that_lessens_the_error(rng: np.random.Generator) -> None:
    row = np.append(rng.uniform(-1, 1, 40_000), 1.7)
    weight = np.stack([row, rng.uniform(-1, 1, 40_001)]).astype(np.float32)
    made = quantise_weights(weight, 0, None, np.float32(0.1))
    assert made.scales[0] < 1.5 / 127
    assert made.scales[1] == pytest.approx(np.abs(weight[1]).max() / 127)
