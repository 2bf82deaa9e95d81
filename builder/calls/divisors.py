"""Integers that every integer can be divided by."""

from __future__ import annotations

import numpy as np


def is_harmless(divisor: np.ndarray) -> bool:
    """Whether integers can be divided by all of `divisor`: none is 0 or, if they have a sign, -1."""
    return bool(divisor.all()) and (divisor.dtype.kind == "u" or not (divisor == -1).any())
