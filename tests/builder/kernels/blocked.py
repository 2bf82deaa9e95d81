"""Random weights in blocks."""

from __future__ import annotations

import numpy as np

from builder.calls.blocked_weights import BlockedWeights

_CODES = {("int8", 4): (-8, 8), ("uint8", 4): (0, 16), ("int8", 8): (-128, 128), ("uint8", 8): (0, 256)}


def blocked_weights(
    shape: tuple[int, int], block: int, dtype: str, bits: int, *, axis: int = 0, zeros: bool = True
) -> BlockedWeights:
    """Return weights whose codes take the whole range of their bits."""
    random = np.random.default_rng(block + shape[0])
    low, high = _CODES[dtype, bits]
    codes = random.integers(low, high, shape).astype(dtype)
    codes.flat[0], codes.flat[-1] = low, high - 1
    parts = list(shape)
    parts[axis] = -(-shape[axis] // block)
    points = random.integers(low, high, parts) if zeros else np.zeros(parts)
    scales = random.uniform(0.5, 1.5, parts).astype("float32")
    return BlockedWeights(codes, scales, points.astype(dtype), axis, block)
