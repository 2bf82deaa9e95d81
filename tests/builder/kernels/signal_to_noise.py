"""How far a result is from the right one, in decibels."""

from __future__ import annotations

import numpy as np


def decibels(got: np.ndarray, want: np.ndarray) -> float:
    """Return the ratio of `want` to its difference from `got`."""
    got, want = got.astype("f8"), want.astype("f8")
    noise = float(((got - want) ** 2).sum())
    return float(10 * np.log10((want**2).sum() / max(noise, 1e-300)))
