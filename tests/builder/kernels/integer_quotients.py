"""Pairs of integers that are hard to divide, and their quotients in exact arithmetic."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np

Array = np.ndarray[Any, Any]

EVERY_TYPE: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def operands(dtype: str) -> tuple[Array, Array]:
    """Return dividends and divisors: zeros, both signs, and the ends of the type."""
    info = np.iinfo(dtype)
    low, high = int(info.min), int(info.max)
    near = (low, low + 1, -7, -3, -2, -1, 0, 1, 2, 3, 7, 100, high - 1, high)
    pairs = itertools.product(sorted({value for value in near if low <= value <= high}), repeat=2)
    a, b = zip(*pairs, strict=True)
    return np.array(a, dtype), np.array(b, dtype)


def quotient(kind: str, a: Array, b: Array) -> Array:
    """Return quotients, or remainders, of integers; 0 where the divisor is 0.

    Parameters
    ----------
    kind
        `truncated` or `floor` for a quotient, `remainder` or `floor remainder` for what is left.
    a, b
        Dividends and divisors.
    """

    def one(x: int, y: int) -> int:
        if y == 0:
            return 0
        floor = x // y
        truncated = -(-x // y) if (x < 0) != (y < 0) else floor
        return {
            "truncated": truncated,
            "floor": floor,
            "remainder": x - truncated * y,
            "floor remainder": x - floor * y,
        }[kind]

    exact = [one(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    bits = np.iinfo(a.dtype).bits
    return np.array([value % (1 << bits) for value in exact], f"uint{bits}").astype(a.dtype)
