"""Levels of weights and biases: int8 for each output channel, int32 with the scale of the products.

Promises that no sum of products and bias leaves int32, whatever the input: scales are raised until it fits.
Where a device adds four products in 16 bits before it adds them to a sum, this is asked of these sums too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.quantising.ranges import LEVELS, SMALLEST_SCALE

LARGEST_WEIGHT: Final = 127  # -128 is not used, so that sums of two products fit int16 (docs/quantisation.md)
_INT32_MAX: Final = (1 << 31) - 1
# Of four weights whose products with any byte are added in 16 bits: 255 * 128 fits. Each may round up.
_FOUR_IN_WORDS: Final = 255 - 4 / 2
_CLIP_STEPS: Final = 20
_CLIP_TO: Final = 0.5
# Of int32, for rounding: a weight's level may round up where the bound below does not.
_SAFETY: Final = 1.01

_PART: Final = 1 << 20  # weights that are worked on at a time: a few copies of them in float64

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """Constants of a convolution or matrix product.

    `weight`: int8, in the shape of the float weight, from -127 to 127.
    `scales`: float32, shape [channels].
    `bias`: int32, shape [channels]; None without one.
    `bias_scales`: float32, shape [channels]: the input's scale times `scales`.
    `raised`: how many channels have a larger scale than their weights ask for, so that sums fit int32.
    `widened`: the mean of the channels' scales, relative to what their weights ask for, if sums of four
        products fit 16 bits for that; else 1.
    """

    weight: NDArray[np.int8]
    scales: NDArray[np.float32]
    bias: NDArray[np.int32] | None
    bias_scales: NDArray[np.float32]
    raised: int
    widened: float = 1.0


def quantise_weights(
    weight: Array,
    axis: int,
    bias: Array | None,
    input_scale: np.float32,
    correction: Array | None = None,
    scales: NDArray[np.float64] | None = None,
    *,
    in_words: bool = False,
) -> QuantisedWeights:
    """Quantise the constants of an operator.

    `bias`: float32, shape [channels], or one number; None without one.
    `correction`: float64, shape [channels]: what is subtracted from the bias, in the units of the float
        model. None corrects nothing, and adds no bias to an operator without one.
    `scales`: the result of `best_scales` for this weight, if it is known.
    `in_words`: whether sums of four products of adjacent even, or odd, inputs must fit 16 bits.
    """
    rows = _rows(weight, axis)
    channels = len(rows)
    scales = best_scales(weight, axis) if scales is None else scales
    widened = 1.0
    if in_words:
        wide = np.maximum(scales, _fours(weight, axis) / _FOUR_IN_WORDS)
        scales, widened = wide, float((wide / scales).mean())
    shift = np.zeros(channels) if bias is None else np.broadcast_to(bias.astype(np.float64).ravel(), channels)
    if correction is not None:
        shift = shift - correction
    sums = np.empty(channels)
    for part in _parts(rows):
        sums[part] = np.abs(rows[part]).sum(axis=1, dtype=np.float64)
    wanted = _fitting(sums, rows.shape[1], scales, shift, float(input_scale)).astype(np.float32)
    raised = int(np.count_nonzero(wanted > scales.astype(np.float32) * np.float32(1.0001)))
    levels = np.empty(rows.shape, np.int8)
    for part in _parts(rows):
        steps = np.rint(rows[part] / wanted[part, None].astype(np.float64))
        levels[part] = np.clip(steps, -LARGEST_WEIGHT, LARGEST_WEIGHT)
        sums[part] = np.abs(levels[part]).sum(axis=1, dtype=np.int64)
    bias_scales = (input_scale * wanted).astype(np.float32)
    added = None
    if bias is not None or correction is not None:
        limit = _INT32_MAX - LEVELS * sums
        added = np.clip(np.rint(shift / bias_scales.astype(np.float64)), -limit, limit).astype(np.int32)
    moved = (channels, *weight.shape[:axis], *weight.shape[axis + 1 :])
    restored = np.ascontiguousarray(np.moveaxis(levels.reshape(moved), 0, axis))
    return QuantisedWeights(restored, wanted, added, bias_scales, raised, widened)


def best_scales(weight: Array, axis: int) -> NDArray[np.float64]:
    """The scale of each output channel with the least squared error, shape [channels].

    It is that of the channel's largest weight, or a smaller one that clips the largest weights.
    """
    rows = _rows(weight, axis)
    scales = np.empty(len(rows))
    for part in _parts(rows):
        scales[part] = _least_error(rows[part].astype(np.float64))
    return np.asarray(np.maximum(scales, SMALLEST_SCALE), np.float64)


def _rows(weight: Array, axis: int) -> Array:
    """The weights of each output channel as a row: [channels, inputs of a sum]."""
    rows: Array = np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)
    return rows


def _fours(weight: Array, axis: int) -> NDArray[np.float64]:
    """The largest sum of four absolute weights of a channel whose products are added in 16 bits.

    The four are the even, or the odd, ones of eight adjacent inputs, at one place of a window.
    """
    inputs = np.abs(np.moveaxis(weight, axis, 0))
    channels, depth = inputs.shape[:2]
    filled = np.pad(inputs.reshape(channels, depth, -1), [(0, 0), (0, -depth % 8), (0, 0)])
    fours = filled.reshape(channels, -1, 4, 2, filled.shape[2]).sum(axis=2, dtype=np.float64)
    return np.asarray(fours.reshape(channels, -1).max(axis=1, initial=0.0))


def _parts(rows: Array) -> Iterator[slice]:
    """Parts of rows with at most `_PART` weights, or one row."""
    step = max(1, _PART // max(rows.shape[1], 1))
    for first in range(0, len(rows), step):
        yield slice(first, first + step)


def _least_error(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    largest = np.abs(rows).max(axis=1, initial=0.0)
    best = np.maximum(largest / LARGEST_WEIGHT, SMALLEST_SCALE)
    least = np.full(len(rows), np.inf)
    for factor in np.linspace(1.0, _CLIP_TO, _CLIP_STEPS):
        scales = np.maximum(largest * factor / LARGEST_WEIGHT, SMALLEST_SCALE)[:, None]
        steps = np.clip(np.rint(rows / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT)
        error = ((steps * scales - rows) ** 2).sum(axis=1)
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better, scales[:, 0], best)
    return np.asarray(best, np.float64)


def _fitting(
    sums: Array, inputs: int, scales: Array, shift: Array, input_scale: float
) -> NDArray[np.float64]:
    """Scales raised where the largest sum of products and bias would not fit int32.

    `sums`: the sum of each channel's absolute weights, in the units of the float model.
    """
    needed = LEVELS * sums / scales + np.abs(shift) / (input_scale * scales)
    # Weights that round up to the next level add at most half a level each.
    needed = needed + LEVELS * inputs / 2
    return np.asarray(scales * np.maximum(1.0, needed * _SAFETY / _INT32_MAX), np.float64)
