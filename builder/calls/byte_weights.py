"""Weights less their zero point as bytes again, though the differences take nine bits.

A byte less another one is between -255 and 255. The weights of one output channel never span more than 256
numbers, so a constant for each channel moves them into int8. What the constants add to the sums takes one
more sum, which has no weights:

    sum(x * w)  =  sum(x * (w - c)) + c * sum(x)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ByteWeights:
    """Weights as int8, and what was subtracted from them.

    Attributes
    ----------
    numbers
        The weights less `moved`, int8.
    moved
        A number for each output channel; zeros if the weights fitted as they were.
    total
        The sum of all weights of each output channel, before they were moved.
    """

    numbers: npt.NDArray[np.int8]
    moved: Integers
    total: Integers

    @classmethod
    def of(cls, weights: npt.NDArray[Any], axis: int) -> ByteWeights | None:
        """Move integer weights into int8; None if those of a channel span more than 256 numbers.

        Parameters
        ----------
        weights
            Integers of any type.
        axis
            Their axis of output channels.
        """
        rows = np.moveaxis(weights.astype(np.int64), axis, 0)
        flat = rows.reshape(len(rows), -1)
        if not flat.size:
            return None
        least, largest = flat.min(1), flat.max(1)
        moved = np.maximum(largest - 127, 0) + np.minimum(least + 128, 0)
        if (least - moved).min() < -128 or (largest - moved).max() > 127:
            return None
        numbers = rows - moved.reshape(-1, *[1] * (rows.ndim - 1))
        bytes_ = np.ascontiguousarray(np.moveaxis(numbers, 0, axis).astype(np.int8))
        return cls(bytes_, moved, flat.sum(1))
