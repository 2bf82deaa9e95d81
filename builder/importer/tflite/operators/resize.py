"""RESIZE_BILINEAR and RESIZE_NEAREST_NEIGHBOR."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout

_UNIT: Final = 1024


def _sizes(op: Operation) -> tuple[tuple[int, int], tuple[int, int]]:
    """Height and width of the input and of the output."""
    shape, wanted = op.shape(0), op.integers(1, "size")
    if len(shape) != 4 or len(wanted) != 2 or min(wanted) < 1 or min(shape) < 1:
        raise RefusalError(f"expected a picture and its new size, got {list(shape)} and {wanted}")
    op.graph.check_made(max(*wanted, *shape[1:3]))
    return (shape[1], shape[2]), (wanted[0], wanted[1])


def resize_bilinear(op: Operation) -> None:
    """RESIZE_BILINEAR of a picture [n, h, w, c]."""
    options = op.options("ResizeBilinearOptions")
    extents, wanted = _sizes(op)
    # For uint8, the interpreter computes places as real numbers.
    if op.input(0).is_quantised and op.input(0).dtype != "uint8":
        how = {"align_corners": bool(options.AlignCorners()), "half_pixel": bool(options.HalfPixelCenters())}
        lines = [_Line(extent, size, **how) for extent, size in zip(extents, wanted, strict=True)]
        if not all(line.is_exact for line in lines):
            _multiply(op, lines)
            return
    if options.AlignCorners():
        mode = "align_corners"
    else:
        mode = "half_pixel" if options.HalfPixelCenters() else "asymmetric"
    x = op.real(0, Layout.FIRST)
    sizes = op.graph.constant([*op.graph.shape_of(x)[:2], *wanted])
    result = op.graph.node("Resize", x, "", "", sizes, mode="linear", coordinate_transformation_mode=mode)
    op.put_real(result, Layout.FIRST)


@dataclass(frozen=True, slots=True)
class _Line:
    """An axis of a quantised picture, whose places the interpreter rounds to 1/1024 of an element.

    The step between two places is rounded, too, so the last ones of a long axis are off by a quarter of an
    element. Source: reference_ops.h, ResizeBilinearInteger.

    `extent`, `size`: its elements, before and after.
    `align_corners`, `half_pixel`: where the first and the last element lie.
    """

    extent: int
    size: int
    align_corners: bool
    half_pixel: bool

    @property
    def _spans(self) -> tuple[int, int]:
        """The distances that become each other, before and after; they may be between the end elements."""
        ends = int(self.align_corners and self.size > 1)
        return self.extent - ends, self.size - ends

    def places(self) -> NDArray[np.int64]:
        """Where each element of the result lies, in 1024ths of an element."""
        before, after = self._spans
        step = (_UNIT * before + after // 2) // after
        offset = step // 2 - _UNIT // 2 if self.half_pixel else 0
        return np.arange(self.size, dtype=np.int64) * step + offset

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        before, after = self._spans
        step, rest = divmod(_UNIT * before, after)
        return rest == 0 and not (self.half_pixel and step % 2)

    def matrix(self) -> NDArray[np.float32]:
        """The weight of each element for each element of the result, [size, extent]."""
        places = self.places()
        first = np.minimum(np.maximum(places, 0) // _UNIT, self.extent - 1)
        second = np.minimum(np.maximum(places + _UNIT - 1, 0) // _UNIT, self.extent - 1)
        part = (places - first * _UNIT) / _UNIT
        rows = np.arange(self.size)
        weights = np.zeros((self.size, self.extent))
        np.add.at(weights, (rows, first), 1 - part)
        np.add.at(weights, (rows, second), part)
        return weights.astype(np.float32)


def _multiply(op: Operation, lines: list[_Line]) -> None:
    """Multiply the rows and the columns of a picture by matrices."""
    for line in lines:
        op.graph.check_made(line.extent * line.size)
    rows, columns = (op.graph.constant(line.matrix()) for line in lines)
    x = op.graph.node("MatMul", rows, op.real(0, Layout.FIRST))
    columns = op.graph.node("Transpose", columns, perm=[1, 0])
    op.put_real(op.graph.node("MatMul", x, columns), Layout.FIRST)


def nearest(extent: int, size: int, *, align_corners: bool, half_pixel: bool) -> list[int]:
    """Which element each element of the result takes (reference_ops.h, GetNearestNeighbor).

    Computed in float32, as the interpreter does: at a boundary, rounding decides.
    """
    scale = np.float32(extent) / np.float32(size)
    if align_corners and size > 1:
        scale = np.float32(extent - 1) / np.float32(size - 1)
    offset = np.float32(0.5 if half_pixel else 0)
    places = (np.arange(size, dtype=np.float32) + offset) * scale
    chosen = np.floor(places + np.float32(0.5)) if align_corners else np.floor(places)
    return [int(index) for index in np.clip(chosen, 0, extent - 1)]


def resize_nearest_neighbor(op: Operation) -> None:
    """RESIZE_NEAREST_NEIGHBOR of a picture [n, h, w, c]."""
    options = op.options("ResizeNearestNeighborOptions")
    extents, wanted = _sizes(op)
    indices = [
        nearest(extent, size, align_corners=options.AlignCorners(), half_pixel=options.HalfPixelCenters())
        for extent, size in zip(extents, wanted, strict=True)
    ]
    repeats = all(
        size % extent == 0 and chosen == [i // (size // extent) for i in range(size)]
        for extent, size, chosen in zip(extents, wanted, indices, strict=True)
    )
    if repeats:
        x = op.real(0, Layout.FIRST)
        sizes = op.graph.constant([*op.graph.shape_of(x)[:2], *wanted])
        result = op.graph.node(
            "Resize", x, "", "", sizes,
            mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip
        op.put_real(result, Layout.FIRST)
        return
    layout = op.layout()
    first = 1 if layout is Layout.LAST else 2
    op.move(lambda x, _: op.gather(op.gather(x, indices[0], first), indices[1], first + 1), layout=layout)
