"""Parts of tensors at places that are known: SLICE, STRIDED_SLICE, DYNAMIC_UPDATE_SLICE."""

from __future__ import annotations

import math

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout


def slice_(op: Operation) -> None:
    """SLICE: `size` elements from `begin` on; a size of -1 means all that follow."""
    shape = op.shape(0)
    begins, sizes = op.integers(1, "begin"), op.integers(2, "size")
    if not len(begins) == len(sizes) == len(shape):
        raise RefusalError(f"expected {len(shape)} begins and sizes, got {begins} and {sizes}")
    ends = []
    for begin, size, extent in zip(begins, sizes, shape, strict=True):
        end = extent if size == -1 else begin + size
        if not 0 <= begin <= end <= extent:
            raise RefusalError(f"expected parts of {list(shape)}, got {begins} and {sizes}")
        ends.append(end)

    def change(x: str, _: Layout) -> str:
        return op.graph.node("Slice", x, op.graph.constant(begins), op.graph.constant(ends))

    op.move(change) if shape else op.move(lambda x, _: x)


def strided_slice(op: Operation) -> None:
    """STRIDED_SLICE with all masks (tensorflow's tf.strided_slice)."""
    options = op.options("StridedSliceOptions")
    shape = op.shape(0)
    begins, ends, steps = (op.integers(i, what) for i, what in ((1, "begin"), (2, "end"), (3, "strides")))
    if not len(begins) == len(ends) == len(steps) <= 16:
        raise RefusalError(f"expected as many ends and strides as begins, got {begins}, {ends}, {steps}")
    places = _places(op, len(begins))
    axes, starts, stops, strides, result = [], [], [], [], []
    axis = 0
    for index in places:
        if index is None:  # stands for a whole axis
            result.append(shape[axis])
            axis += 1
            continue
        bit = 1 << index
        if options.NewAxisMask() & bit:
            result.append(1)
            continue
        if axis >= len(shape):
            raise RefusalError(f"expected at most {len(shape)} axes, got {len(begins)}")
        extent, step = shape[axis], steps[index]
        if step == 0:
            raise RefusalError("expected strides other than 0")
        shrinks = bool(options.ShrinkAxisMask() & bit)
        begin = begins[index] if shrinks or not options.BeginMask() & bit else (0 if step > 0 else extent)
        if shrinks:
            place = begin + extent if begin < 0 else begin
            if not 0 <= place < extent:
                raise RefusalError(f"expected an index of {extent} elements, got {begin}")
            first, last, step = place, place + 1, 1
        else:
            end = ends[index] + (begins[index] if options.Offset() else 0)
            first, last = _bounds(begin, end, step, extent, is_open=bool(options.EndMask() & bit))
        count = max(-(-(last - first) // step), 0)
        if not shrinks:
            result.append(count)
        axes.append(axis)
        starts.append(first)
        # A reversed slice that ends before the first element: -1 would mean the last one.
        stops.append(last if last >= 0 else -(2**31))
        strides.append(step)
        axis += 1
    result += shape[axis:]

    def change(x: str, _: Layout) -> str:
        if axes and any(
            (start, stop, stride) != (0, shape[a], 1)
            for a, start, stop, stride in zip(axes, starts, stops, strides, strict=True)
        ):
            x = op.graph.node("Slice", x, *(op.graph.constant(v) for v in (starts, stops, axes, strides)))
        return op.reshape(x, result)

    op.move(change)


def _places(op: Operation, count: int) -> list[int | None]:
    """The entry for each axis of the result in turn; None for an axis that the ellipsis stands for."""
    options = op.options("StridedSliceOptions")
    ellipses = [index for index in range(count) if options.EllipsisMask() & (1 << index)]
    if len(ellipses) > 1:
        raise RefusalError("expected at most one ellipsis")
    new = sum(1 for i in range(count) if options.NewAxisMask() & (1 << i) and i not in ellipses)
    places: list[int | None] = []
    for index in range(count):
        if index in ellipses:
            places += [None] * max(op.scope.rank(op.input(0)) - (count - 1 - new), 0)
        else:
            places.append(index)
    return places


def _bounds(begin: int, end: int, step: int, extent: int, *, is_open: bool) -> tuple[int, int]:
    """First element and end of a slice, within the axis."""
    low, high = (0, extent) if step > 0 else (-1, extent - 1)
    first = min(max(begin + extent if begin < 0 else begin, low), high)
    if is_open:
        return first, (extent if step > 0 else -1)
    return first, min(max(end + extent if end < 0 else end, low), high)


def dynamic_update_slice(op: Operation) -> None:
    """DYNAMIC_UPDATE_SLICE: another tensor's elements from a place on, which is kept inside."""
    shape, part = op.shape(0), op.shape(1)
    if len(shape) != len(part) or any(a > b for a, b in zip(part, shape, strict=True)):
        raise RefusalError(f"expected a part of {list(shape)}, got {list(part)}")
    if not shape:
        op.put(op.value(1))
        return
    op.graph.check_made(math.prod(part) * len(part))
    start = op.reshape(op.cast(op.value(2), "int64"), (len(shape),))
    most = op.graph.constant([a - b for a, b in zip(shape, part, strict=True)])
    start = op.graph.node("Min", op.graph.node("Max", start, op.graph.constant([0])), most)
    grid = np.stack(np.meshgrid(*(np.arange(dim) for dim in part), indexing="ij"), axis=-1)
    places = op.graph.node("Add", op.graph.constant(grid.astype(np.int64)), start)
    op.put(op.graph.node("ScatterND", op.value(0), places, op.value(1)))
