"""Gathers and scatters of StableHLO: windows of a tensor at places that come with a request.

A window is computed as rows of the flattened tensor; axes at its end of which it has all stay whole. Source:
StableHLO specification (openxla.org/stablehlo/spec), gather and scatter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import SMALL, Operation
from builder.importer.tflite.operators.stablehlo import numbers

# How an update changes an element; none replaces it.
_REDUCTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"": "none", "Add": "add", "Mul": "mul", "Max": "max", "Min": "min"}
)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a flattened tensor that windows have.

    `index`: the number of each row, [windows, rows of a window].
    `inside`: whether the tensor has this row, of the same shape.
    `count`, `width`: how many rows the tensor has, and the elements of one.
    """

    index: str
    inside: str
    count: int
    width: int


def gather(op: Operation) -> None:
    """STABLEHLO_GATHER of windows of a known size, which are kept inside."""
    options = op.options("StablehloGatherOptions")
    sizes, places, dropped, mapped = (
        numbers(options, name) for name in ("SliceSizes", "OffsetDims", "CollapsedSliceDims", "StartIndexMap")
    )
    shape = op.shape(0)
    kept = [size for axis, size in enumerate(sizes) if axis not in dropped]
    batch = _batch(op, options.IndexVectorDim())
    rank = len(batch) + len(places)
    if (
        len(sizes) != len(shape)
        or not _are_axes(places, rank)
        or any(sizes[axis] != 1 for axis in dropped if axis < len(sizes))
        or len(kept) != len(places)
    ):
        raise RefusalError(f"expected a window of {list(shape)}, got {sizes}")
    rows = _rows(op, options.IndexVectorDim(), mapped, sizes, keep_inside=True)

    def change(x: str, _: object) -> str:
        x = op.graph.node("Gather", op.reshape(x, (rows.count, rows.width)), rows.index, axis=0)
        x = op.reshape(x, [*batch, *kept])
        return op.graph.node("Transpose", x, perm=_order(places, rank)) if rank > 1 else x

    op.move(change)


def scatter(op: Operation, operator: str) -> None:
    """STABLEHLO_SCATTER of one tensor; what lies outside is left out.

    `operator`: ONNX's operator that makes one number of an element and its update; empty if the update
        replaces it.
    """
    if op.count != 3 or operator not in _REDUCTIONS:
        raise RefusalError(
            f"expected a tensor, indices, updates and a sum, a product or an extreme of {op.count}"
        )
    options = op.options("StablehloScatterOptions")
    places, dropped, mapped = (
        numbers(options, name)
        for name in ("UpdateWindowDims", "InsertedWindowDims", "ScatterDimsToOperandDims")
    )
    shape, updates = op.shape(0), op.shape(2)
    batch = _batch(op, options.IndexVectorDim())
    axes = [axis for axis in range(len(shape)) if axis not in dropped]
    if (
        len(axes) != len(places)
        or not _are_axes(places, len(updates))
        or len(updates) != len(batch) + len(places)
    ):
        raise RefusalError(f"expected updates of windows of {list(shape)}, got {list(updates)}")
    sizes = [1] * len(shape)
    for axis, place in zip(axes, places, strict=True):
        sizes[axis] = updates[place]
    rows = _rows(op, options.IndexVectorDim(), mapped, sizes, keep_inside=False)
    graph, dtype = op.graph, str(op.graph.dtype_of(op.real(0)))
    data, new = op.reshape(op.real(0), (rows.count, rows.width)), op.real(2)
    order = _order(places, len(updates))
    new = graph.node("Transpose", new, perm=np.argsort(order).tolist()) if len(order) > 1 else new
    new = op.reshape(new, (math.prod(graph.shape_of(rows.index)), rows.width))
    if dtype in SMALL:
        data, new = op.cast(data, "int32"), op.cast(new, "int32")
    # What lies outside goes to one more row, which is cut off.
    spare = graph.constant(np.zeros((1, rows.width)), str(graph.dtype_of(data)))
    data = graph.node("Concat", data, spare, axis=0)
    index = graph.node("Where", rows.inside, rows.index, graph.constant(rows.count, "int64"))
    index = graph.node("Expand", op.reshape(index, (-1, 1)), graph.constant(list(graph.shape_of(new))))
    result = graph.node("ScatterElements", data, index, new, axis=0, reduction=_REDUCTIONS[operator])
    bounds = [graph.constant([bound]) for bound in (0, rows.count, 0)]
    op.put_real(op.cast(op.reshape(graph.node("Slice", result, *bounds), shape), dtype))


def _are_axes(places: Sequence[int], rank: int) -> bool:
    return len(set(places)) == len(places) and all(0 <= place < rank for place in places)


def _order(places: Sequence[int], rank: int) -> list[int]:
    """The permutation of batches, then axes of a window, that puts the window's at `places`."""
    batches = [place for place in range(rank) if place not in places]
    return [
        len(batches) + list(places).index(place) if place in places else batches.index(place)
        for place in range(rank)
    ]


def _batch(op: Operation, vector_axis: int) -> list[int]:
    """How many windows there are, along each axis of the indices but that of their coordinates."""
    shape = op.shape(1)
    if not 0 <= vector_axis <= len(shape):
        raise RefusalError(f"expected an axis of {list(shape)}, got {vector_axis}")
    return [size for axis, size in enumerate(shape) if axis != vector_axis]


def _rows(
    op: Operation, vector_axis: int, mapped: Sequence[int], sizes: Sequence[int], *, keep_inside: bool
) -> _Rows:
    """Compute the rows of each window, whose first element the indices (input 1) name.

    `vector_axis`: the axis of the indices that has coordinates; behind the last, each index is a coordinate.
    `mapped`: the tensor's axis of each coordinate.
    `sizes`: the extents of a window, of all axes of the tensor.
    `keep_inside`: whether a window that begins outside begins at the edge.
    """
    shape, graph = op.shape(0), op.graph
    given = op.shape(1)
    count = given[vector_axis] if vector_axis < len(given) else 1
    if (
        len(mapped) != count
        or not _are_axes(mapped, len(shape))
        or any(not 1 <= size <= extent for size, extent in zip(sizes, shape, strict=True))
        or 0 in given
    ):
        raise RefusalError(f"expected {count} axes of {list(shape)} and a window in it, got {list(sizes)}")
    cut = len(shape)
    while cut and cut - 1 not in mapped and sizes[cut - 1] == shape[cut - 1]:
        cut -= 1
    height, width = math.prod(sizes[:cut]), math.prod(shape[cut:])
    graph.check_made(height * max(len(shape), 1))
    steps = [math.prod(shape[axis + 1 : cut]) for axis in range(cut)]
    offsets = np.stack(np.unravel_index(np.arange(height), [*sizes[:cut], 1]), axis=-1)[:, :cut]
    starts = op.cast(op.value(1), "int64")
    order = [axis for axis in range(len(given)) if axis != vector_axis]
    if vector_axis < len(given) - 1:
        starts = graph.node("Transpose", starts, perm=[*order, vector_axis])
    starts = op.reshape(starts, (math.prod(given) // count, 1, count))
    if keep_inside:
        last = graph.constant([shape[axis] - sizes[axis] for axis in mapped])
        starts = graph.node("Min", graph.node("Max", starts, graph.constant([0])), last)
    extents = graph.constant([shape[axis] for axis in mapped])
    places = graph.node("Add", starts, graph.constant(offsets[:, list(mapped)].astype(np.int64)))
    is_late = graph.node("GreaterOrEqual", places, extents)
    is_outside = graph.node("Or", is_late, graph.node("Less", places, graph.constant([0])))
    some = graph.node("ReduceMax", op.cast(is_outside, "int32"), graph.constant([2]), keepdims=0)
    moved = graph.node("Mul", places, graph.constant([steps[axis] for axis in mapped]))
    index = graph.node("ReduceSum", moved, graph.constant([2]), keepdims=0)
    others = [axis for axis in range(cut) if axis not in mapped]
    fixed = offsets[:, others] @ np.array([steps[axis] for axis in others], np.int64).reshape(-1)
    index = graph.node("Add", index, graph.constant(fixed.astype(np.int64)))
    inside = graph.node("Equal", some, graph.constant(0, "int32"))
    return _Rows(index, inside, math.prod(shape[:cut]), width)
