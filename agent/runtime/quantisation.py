"""Real numbers to the integers of a quantised input, and the integers of a quantised output to real numbers.

The one place for pictures, sound, rows and tensors. The rule is ONNX's QuantizeLinear: divided by the scale
in float32, rounded to the nearest integer (half to even), moved by the zero point, clipped to the datatype's
range.
"""

from __future__ import annotations

import numpy as np

from agent.bundle.quantisation import Quantised
from agent.runtime.storage import Array


def to_input(values: Array, dtype: str, quantised: Quantised | None) -> Array:
    """Return the numbers that a model's input gets for real ones.

    Parameters
    ----------
    values
        Real numbers, finite if the input takes integers.
    dtype
        The input's dtype.
    quantised
        How the input is quantised; None if it is not: integers are then rounded and clipped.
    """
    wanted = np.dtype(dtype)
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        wide = values.astype(np.float64)
        if quantised is not None:
            with np.errstate(over="ignore"):  # infinity is clipped, too
                wide = (wide.astype(np.float32) / np.float32(quantised.scale)).astype(np.float64)
        zero = 0 if quantised is None else quantised.zero
        values = np.clip(np.rint(wide) + zero, limits.min, limits.max)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(wanted)
    return converted


def to_real(values: Array, quantised: Quantised | None) -> Array:
    """Return the real numbers that an output stands for: float32, or `values` if it is not quantised."""
    if quantised is None:
        return values
    real: Array = ((values.astype(np.float64) - quantised.zero) * quantised.scale).astype(np.float32)
    return real
