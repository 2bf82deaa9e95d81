"""Levels of weights and biases: int8 for each output channel, int32 with the scale of the products.

Promises that no sum of products and bias leaves int32, whatever the input: scales are raised until it fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.quantising.ranges import LEVELS, SMALLEST_SCALE

LARGEST_WEIGHT: Final = 127  # -128 is not used, so that sums of two products fit int16 (docs/quantisation.md)
_INT32_MAX: Final = (1 << 31) - 1
_CLIP_STEPS: Final = 20
_CLIP_TO: Final = 0.5
# Of int32, for rounding: a weight's level may round up where the bound below does not.
_SAFETY: Final = 1.01

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """Constants of a convolution or matrix product.

    Attributes
    ----------
    weight
        int8, in the shape of the float weight, from -127 to 127.
    scales
        float32, shape [channels].
    bias
        int32, shape [channels]; None without one.
    bias_scales
        float32, shape [channels]: the input's scale times `scales`.
    raised
        How many channels have a larger scale than their weights ask for, so that sums fit int32.
    """

    weight: NDArray[np.int8]
    scales: NDArray[np.float32]
    bias: NDArray[np.int32] | None
    bias_scales: NDArray[np.float32]
    raised: int


def quantise_weights(
    weight: Array, axis: int, bias: Array | None, input_scale: np.float32, correction: Array | None = None
) -> QuantisedWeights:
    """Quantise the constants of an operator.

    Parameters
    ----------
    weight
        float32, any shape.
    axis
        Its axis of output channels.
    bias
        float32, shape [channels], or one number; None without one.
    input_scale
        The scale of the input's levels.
    correction
        float64, shape [channels]: what is subtracted from the bias, in the units of the float model. None
        corrects nothing, and adds no bias to an operator without one.
    """
    rows = as_rows(weight, axis)
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = np.maximum(_least_error(rows, largest), SMALLEST_SCALE)
    shift = (
        np.zeros(len(rows)) if bias is None else np.broadcast_to(bias.astype(np.float64).ravel(), len(rows))
    )
    if correction is not None:
        shift = shift - correction
    wanted = _fitting(rows, scales, shift, float(input_scale)).astype(np.float32)
    raised = int(np.count_nonzero(wanted > scales.astype(np.float32) * np.float32(1.0001)))
    steps = np.clip(np.rint(rows / wanted[:, None].astype(np.float64)), -LARGEST_WEIGHT, LARGEST_WEIGHT)
    bias_scales = (input_scale * wanted).astype(np.float32)
    added = None
    if bias is not None or correction is not None:
        limit = _INT32_MAX - LEVELS * np.abs(steps).sum(axis=1)
        added = np.clip(np.rint(shift / bias_scales.astype(np.float64)), -limit, limit).astype(np.int32)
    levels = _from_rows(steps.astype(np.int8), weight.shape, axis)
    return QuantisedWeights(levels, wanted, added, bias_scales, raised)


def as_rows(weight: Array, axis: int) -> NDArray[np.float64]:
    """The weights of each output channel as a row, in float64: [channels, inputs of a sum]."""
    return np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1).astype(np.float64)


def _from_rows(rows: Array, shape: tuple[int, ...], axis: int) -> Array:
    moved = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return np.ascontiguousarray(np.moveaxis(rows.reshape(moved), 0, axis))


def _least_error(rows: NDArray[np.float64], largest: Array) -> NDArray[np.float64]:
    """The scale of each row with the least squared error: that of its largest weight, or a smaller one."""
    best = np.maximum(largest / LARGEST_WEIGHT, SMALLEST_SCALE)
    least = np.full(len(rows), np.inf)
    for factor in np.linspace(1.0, _CLIP_TO, _CLIP_STEPS):
        scales = np.maximum(largest * factor / LARGEST_WEIGHT, SMALLEST_SCALE)[:, None]
        steps = np.clip(np.rint(rows / scales), -LARGEST_WEIGHT, LARGEST_WEIGHT)
        error = ((steps * scales - rows) ** 2).sum(axis=1)
        better = error < least
        least = np.where(better, error, least)
        best = np.where(better, scales[:, 0], best)
    return best


def _fitting(rows: Array, scales: Array, shift: Array, input_scale: float) -> NDArray[np.float64]:
    """Scales raised where the largest sum of products and bias would not fit int32."""
    needed = LEVELS * np.abs(rows).sum(axis=1) / scales + np.abs(shift) / (input_scale * scales)
    # Weights that round up to the next level add at most half a level each.
    needed = needed + LEVELS * rows.shape[1] / 2
    return np.asarray(scales * np.maximum(1.0, needed * _SAFETY / _INT32_MAX), np.float64)
