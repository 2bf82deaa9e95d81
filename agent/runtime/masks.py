"""Masks of objects: from the factors of prototypes to run lengths.

Promises one mask an object, at the resolution of the model's input, in COCO's compressed run-length encoding:
ASCII, which every content type can carry, and which `pycocotools.mask.decode` reads.
"""

from __future__ import annotations

import numpy as np

from agent.errors import ExecutionError
from agent.runtime.placement import Placement
from agent.runtime.storage import Array


def cells_of_image(placement: Placement, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Return the cells of a grid that show the image: first and last + 1 row, then column."""
    low_x = placement.offset_x * columns / placement.input_width
    low_y = placement.offset_y * rows / placement.input_height
    high_x = low_x + placement.width * placement.scale_x * columns / placement.input_width
    high_y = low_y + placement.height * placement.scale_y * rows / placement.input_height
    left, right = _span(low_x, high_x, columns)
    top, bottom = _span(low_y, high_y, rows)
    return top, bottom, left, right


def area_of_cells(placement: Placement, rows: int, columns: int, cells: tuple[int, int, int, int]) -> Array:
    """Return the area that cells cover in the image as sent: float32, (x1, y1, x2, y2) in pixels."""
    top, bottom, left, right = cells
    step_x, step_y = placement.input_width / columns, placement.input_height / rows
    return np.array(
        [
            (left * step_x - placement.offset_x) / placement.scale_x,
            (top * step_y - placement.offset_y) / placement.scale_y,
            (right * step_x - placement.offset_x) / placement.scale_x,
            (bottom * step_y - placement.offset_y) / placement.scale_y,
        ],
        np.float32,
    )


def encode_masks(
    weights: Array, prototypes: Array, boxes: Array, size: tuple[int, int], cells: tuple[int, int, int, int]
) -> tuple[bytes, ...]:
    """Return a run-length encoded mask for each object.

    A pixel belongs to an object if it is in its box and the sum of the prototypes, each multiplied by its
    factor and resized bilinearly, is above 0 (YOLACT, arXiv 1904.02689, section 3.1).

    `weights`: float32, shape (m, factors), and `prototypes` (factors, height, width); one that is not finite
    raises ExecutionError. `boxes`: float32, shape (m, 4), corners in pixels of the model's input, whose
    height and width are `size`. `cells`: the pixels of the input that masks cover: first and last + 1 row and
    column.
    """
    if not len(weights):
        return ()
    if not (np.isfinite(weights).all() and np.isfinite(prototypes).all()):
        raise ExecutionError("masks cannot be made of prototypes that are not finite")
    factors = weights.shape[1]
    rows, columns = prototypes.shape[1:]
    top, bottom, left, right = cells
    vertical = _interpolation(rows, size[0])[top:bottom]
    horizontal = _interpolation(columns, size[1])[left:right]
    flat = prototypes.reshape(factors, -1).astype(np.float32)
    masks = []
    for factor, box in zip(weights, boxes, strict=True):
        coarse = (factor @ flat).reshape(rows, columns)
        mask = np.zeros((bottom - top, right - left), dtype=bool)
        x1, y1, x2, y2 = (int(v) for v in np.rint(box - [left, top, left, top]).clip(0, max(size)))
        mask[y1:y2, x1:x2] = vertical[y1:y2] @ coarse @ horizontal[x1:x2].T > 0
        masks.append(run_lengths(mask))
    return tuple(masks)


def run_lengths(mask: Array) -> bytes:
    """Encode a mask, bool of shape (height, width), as COCO's API does (`rleToString` in maskApi.c)."""
    flat = np.concatenate(([False], mask.ravel(order="F")))
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    counts = np.diff(np.concatenate(([0], ends, [mask.size])))
    # From the fourth run on, the difference from the run before the last one is written.
    counts[3:] -= counts[1:-2].copy()
    code = bytearray()
    for count in counts.tolist():
        rest = count
        while True:
            bits = rest & 0x1F
            rest >>= 5
            is_last = rest == (-1 if bits & 0x10 else 0)
            code.append(48 + (bits if is_last else bits | 0x20))
            if is_last:
                break
    return bytes(code)


def _span(low: float, high: float, count: int) -> tuple[int, int]:
    # A cell is taken if most of it shows the image; a thin image still gets one.
    first = min(max(0, round(low)), count - 1)
    return first, max(first + 1, min(count, round(high)))


def _interpolation(before: int, after: int) -> Array:
    """Return the matrix, float32 of shape (after, before), that resizes bilinearly without antialiasing."""
    positions = ((np.arange(after) + 0.5) * before / after - 0.5).clip(0, before - 1)
    low = np.floor(positions).astype(int)
    part = (positions - low).astype(np.float32)
    matrix = np.zeros((after, before), np.float32)
    matrix[np.arange(after), low] = 1 - part
    matrix[np.arange(after), np.minimum(low + 1, before - 1)] += part
    return matrix
