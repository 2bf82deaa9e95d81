"""Memory that kernels may be given.

Promises blocks that start on a 64-byte line, are zero, and cost no physical memory until they are touched.
Kernels assume the alignment and never check it: an unaligned buffer is a SIGSEGV in a vector load, so every
buffer that comes from elsewhere passes `is_aligned` first.
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
    """Allocate a block of zeros that starts on a 64-byte line.

    Parameters
    ----------
    nbytes
        Size of the block. A block of no bytes still has an address.

    Returns
    -------
    Block
        uint8, shape (nbytes,). A large one is calloc's, whose pages are real only once they are written.

    Raises
    ------
    MemoryError
        If the system refuses.
    """
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def view(block: Block, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return the first bytes of `block` as a tensor.

    Raises
    ------
    ValueError
        If the block is too small.
    """
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    if nbytes > block.nbytes:
        raise ValueError(f"a view of {nbytes} bytes does not fit a block of {block.nbytes}")
    return block[:nbytes].view(dtype).reshape(shape)


def is_aligned(array: Array) -> bool:
    """Say whether a kernel may be given this array's memory as it is: contiguous, on a 64-byte line."""
    return bool(array.flags.c_contiguous) and array.ctypes.data % ALIGNMENT == 0
