"""Levels of weights in four bits: 16 of them, with a scale for each block.

The scale of a block is the one with the least squared error among candidates: those that put the block's
largest weight on level -8, as in llama.cpp's Q4_0, or on level 7, each also somewhat smaller, which clips.
Scales are numbers of float16, so that they take two bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LOWEST, HIGHEST = -8, 7
_FACTORS: Final = np.linspace(1.0, 0.7, 7)
_SMALLEST: Final = 2.0**-14  # of float16's normal numbers
_LARGEST: Final = 65504.0
_PART: Final = 1 << 20  # weights that are worked on at a time

Array = NDArray[Any]


def quantise_blocks(weight: Array, axis: int, block: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Quantise a matrix to four bits.

    `weight`: float32, `[rows, columns]`, finite.
    `axis`: the axis that is divided into blocks, 0 or 1.
    `block`: elements of a block; the last one may be incomplete.
    `codes`: int8 from -8 to 7, the shape of `weight`.
    `scales`: float32 that float16 holds, that shape with `ceil(extent / block)` along `axis`.
    """
    rows = weight.T if axis == 0 else weight
    count, extent = rows.shape
    blocks = -(-extent // block)
    codes = np.empty((count, extent), np.int8)
    scales = np.empty((count, blocks), np.float32)
    step = max(1, _PART // max(extent, 1))
    for first in range(0, count, step):
        part = slice(first, min(first + step, count))
        full = np.zeros((part.stop - part.start, blocks * block), np.float32)
        full[:, :extent] = rows[part]
        found, scale = _least_error(full.reshape(-1, block))
        codes[part] = found.reshape(len(full), -1)[:, :extent]
        scales[part] = scale.reshape(len(full), blocks)
    if axis == 0:
        return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)
    return codes, scales


def _least_error(blocks: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Levels and scale of each row of `blocks`."""
    places = np.abs(blocks).argmax(axis=1)
    largest = np.take_along_axis(blocks, places[:, None], 1)[:, 0]
    codes = np.zeros(blocks.shape, np.int8)
    scales = np.full(len(blocks), _SMALLEST, np.float32)
    least = np.full(len(blocks), np.inf, np.float32)
    for level in (LOWEST, HIGHEST):
        for factor in _FACTORS:
            wanted = np.abs(largest) * factor / abs(level)
            scale = np.clip(wanted, _SMALLEST, _LARGEST).astype(np.float16).astype(np.float32)
            # A negative scale would put a positive weight on level -8, but ONNX wants positive ones.
            steps = np.clip(np.rint(blocks / scale[:, None]), LOWEST, HIGHEST)
            error = ((steps * scale[:, None] - blocks) ** 2).sum(axis=1)
            better = error < least
            least = np.where(better, error, least)
            scales = np.where(better, scale, scales)
            codes[better] = steps[better].astype(np.int8)
    return codes, scales
