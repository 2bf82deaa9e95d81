"""Sums of products in float16: in chunks, whose sums are added in float32.

A sum of many numbers in float16 loses digits with each of them: of 4608 products, it is right to 43 dB. A sum
of 64 is right to 61 dB, and float32 adds such sums without loss. So the axes of a reduction are divided: the
inner parts are summed in float16, in registers, and the outer parts in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Final

from builder.kernels.spaces.register_tile import divisors

# Products of a chunk. Each chunk costs seven instructions for a vector of sums. So chunks are rather longer,
# up to `LONGEST`, than shorter than `_FEWEST`.
MOST: Final = 64
_FEWEST: Final = 16
LONGEST: Final = 128


def chunk_of(extents: Sequence[int], whole: int = 1) -> tuple[int, ...]:
    """Return the part of each axis of a reduction that is inside a chunk: a divisor of its extent.

    `extents`: the axes that may be divided.
    `whole`: products of the axes that may not; they are in each chunk.
    """
    choices = list(itertools.product(*(divisors(extent, extent) for extent in extents)))

    def cost(parts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        size = prod(parts) * whole
        inner = tuple(-part for part in reversed(parts))  # of equal sizes, the one that is adjacent in memory
        if _FEWEST <= size <= MOST:
            return 0, -size, inner
        if MOST < size <= LONGEST:
            return 1, size, inner
        return (2, -size, inner) if size <= MOST else (3, size, inner)

    return min(choices, key=cost)
