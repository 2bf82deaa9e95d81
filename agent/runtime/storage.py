"""Aligned memory for kernels.

Promises blocks of zeros that are aligned to 64 bytes and use no physical memory until they are touched.
Kernels assume the alignment without a check, and a vector load from an unaligned buffer is a SIGSEGV, so
every buffer from elsewhere must pass `is_aligned` first.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

# TVM's kAllocAlignment: its kernels are compiled under this assumption (tvm/runtime/device_api.h).
ALIGNMENT: Final = 64

Array = npt.NDArray[Any]
Block = npt.NDArray[np.uint8]


def allocate(nbytes: int) -> Block:
    """Allocate a block of zeros (uint8) that is aligned to 64 bytes; an empty block has an address too.

    A large one comes from calloc, so its pages exist only once they are written.
    """
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def view(block: Block, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return the first bytes of `block` as a tensor of this dtype and shape, without copying.

    A block that is too small raises ValueError.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes > block.nbytes:
        raise ValueError(f"expected a block of at least {nbytes} bytes, got {block.nbytes}")
    return block[:nbytes].view(dtype).reshape(shape)


def is_aligned(array: Array) -> bool:
    """Return whether kernels may use an array's memory as it is: contiguous, aligned to 64 bytes."""
    return bool(array.flags.c_contiguous) and array.ctypes.data % ALIGNMENT == 0
