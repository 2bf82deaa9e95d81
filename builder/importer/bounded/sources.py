"""Operators whose output length depends on values, such as NonZero, TopK and NonMaxSuppression.

Each is written as positions in a padded tensor, and a count. Elements behind the count have any value;
`padding` makes those of the model's outputs zero.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.importer.bounded import suppression
from builder.importer.bounded.length import Entry, Length
from builder.importer.bounded.padded_graph import MAX_CAPACITY, PaddedGraph
from builder.importer.onnx_graph import attributes
from builder.importer.rewrites.replacement import input_name, output_name

# Unique along an axis sorts once for each element of a row.
MAX_COLUMNS: Final = 64
# ONNX Runtime's TopK takes no others.
_SORTED: Final = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32)


def lowest(dtype: np.dtype[Any]) -> float:
    """Return the smallest number of a dtype."""
    if dtype.kind == "f":
        return -math.inf
    return int(np.iinfo(dtype).min) if dtype.kind in "iu" else 0


def highest(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a dtype."""
    if dtype.kind == "f":
        return math.inf
    return int(np.iinfo(dtype).max) if dtype.kind in "iu" else 1


def non_zero(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """NonZero: coordinates [rank, capacity]; the capacity is the number of elements."""
    x = node.input[0]
    shape = g.shape(x)
    if not math.prod(shape):
        g.refuse("its input has no elements")
    found = x
    if g.dtype(x).kind != "b":
        found = g.cast(x, TensorProto.BOOL)
    if mask := g.mask(x):
        found = g.op("And", found, mask)
    places, count = g.positions(g.op("Reshape", found, g.ints(-1)))
    rows = []
    for axis, extent in enumerate(shape):
        row, stride = places, math.prod(shape[axis + 1 :])
        if stride > 1:
            row = g.op("Div", row, g.ints(stride))
        if axis:
            row = g.op("Mod", row, g.ints(extent))
        rows.append(g.op("Unsqueeze", row, g.ints(0)))
    if not rows:
        g.refuse("expected a tensor with dimensions, got a scalar")
    to = node.output[0]
    g.op("Concat", *rows, to=to, axis=0)
    g.bound(to, {1: count})
    g.natural.add(to)


def compress(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Compress: the slices for which a condition is true."""
    x, condition = node.input
    axis = attributes(node).get("axis")
    lengths = dict(g.lengths.get(x, {}))
    if axis is None:
        # Of a padded tensor, the condition counts only what is real: compact it first.
        if any(place > 0 for place in lengths) and len(g.shape(x)) > 1:
            g.refuse("expected an axis along which to select")
        inner = math.prod(g.shape(x)[1:])
        if 0 in lengths:
            lengths = {0: multiplied(g, lengths[0], inner)}
        x = g.op("Reshape", x, g.ints(-1))
        axis = 0
    axis = int(axis) % len(g.shape(x))
    extent = g.shape(x)[axis]
    mask = condition
    if real := g.mask(condition):
        mask = g.op("And", mask, real)
    if g.shape(condition)[0] > extent:
        mask = g.op("Slice", mask, g.ints(0), g.ints(extent), g.ints(0))
    if axis in lengths:
        if g.shape(condition)[0] < extent:
            g.refuse("expected a condition for each slice")
        mask = g.op("And", mask, g.there(lengths[axis]))
    if not g.shape(mask)[0]:
        g.refuse("its condition has no elements")
    places, count = g.positions(mask)
    g.op("Gather", x, places, to=node.output[0], axis=axis)
    g.bound(node.output[0], {**lengths, axis: count})


def multiplied(g: PaddedGraph, length: Length, factor: int) -> Length:
    """Return a length times a number."""
    made = g.arithmetic("Mul", length, factor, length.capacity * factor)
    assert isinstance(made, Length)
    return made


def top_k(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """TopK along a padded axis, or with a k that is computed: at most as many as the axis has."""
    options = attributes(node)
    x, k = node.input
    shape = g.shape(x)
    axis = int(options.get("axis", -1)) % len(shape)
    largest = bool(options.get("largest", 1))
    lengths = dict(g.lengths.get(x, {}))
    entries = g.entries(k)
    wanted: Entry = entries[0] if entries is not None and len(entries) == 1 else _measured(g, k, shape[axis])
    there: Entry = lengths.get(axis, shape[axis])
    most = min(wanted if isinstance(wanted, int) else wanted.capacity, shape[axis])
    if most < 1:
        g.refuse(f"expected at least one element, got {most}")
    dtype = g.dtype(x)
    worst = lowest(dtype) if largest else highest(dtype)
    values = g.filled(x, worst, [axis])
    made = helper.make_node(
        "TopK", [values, g.ints(most)], list(node.output), axis=axis, largest=int(largest), sorted=1,
        name=node.name,
    )  # fmt: skip
    g.add(made)
    count = g.arithmetic("Min", wanted, there, most)
    if isinstance(count, int):
        lengths.pop(axis, None)
    else:
        lengths[axis] = Length(count.name, most)
    for name in node.output:
        if name:
            g.bound(name, lengths)
    if name := output_name(node, 1):
        g.natural.add(name)


def _measured(g: PaddedGraph, k: str, extent: int) -> Length:
    """Turn a number that is only known at run time into a length within an extent."""

    def make() -> Length:
        value = g.op("Reshape", g.cast(k, TensorProto.INT64), g.ints(1))
        return Length(g.op("Max", g.op("Min", value, g.ints(extent)), g.ints(0)), extent)

    made = g.derived(("measured", k, extent), make)
    assert isinstance(made, Length)
    return made


def non_max_suppression(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """NonMaxSuppression: one kernel, which returns the chosen boxes and how many there are."""
    options = attributes(node)
    boxes, scores = node.input[:2]
    if {0} & set(g.lengths.get(boxes, {})) or {0, 1} & set(g.lengths.get(scores, {})):
        g.refuse("expected a known number of pictures and classes")
    batches, classes, count = g.shape(scores)
    valid: Entry = g.lengths.get(scores, {}).get(2) or g.lengths.get(boxes, {}).get(1) or count
    limit = input_name(node, 2)
    most: str = g.cast(limit, TensorProto.INT64) if limit else g.ints(0)
    entries = g.entries(limit) if limit else (0,)
    each = count
    if entries is not None and len(entries) == 1:
        [entry] = entries
        each = min(count, entry if isinstance(entry, int) else entry.capacity)
    if each < 1:
        g.refuse("it chooses no boxes: max_output_boxes_per_class is missing or 0")
    capacity = batches * classes * each
    if capacity > MAX_CAPACITY:
        g.refuse(
            f"expected at most {MAX_CAPACITY} boxes in all, got {batches} x {classes} x {each}: "
            "set max_output_boxes_per_class at the export"
        )
    inputs = [boxes, scores, g.op("Reshape", most, g.ints(1))]
    for index, default in ((3, 0.0), (4, -math.inf)):
        name = input_name(node, index)
        limit = name or g.constant([default], np.float32)
        inputs.append(g.op("Reshape", limit, g.ints(1)))
    inputs.append(g.scalar(valid))
    to = node.output[0]
    number = g.graph.fresh(f"{node.name}/count")
    made = suppression.make_node(
        inputs, [to, number], node.name, int(options.get("center_point_box", 0)), capacity
    )
    g.add(made)
    g.graph.set_type(to, TensorProto.INT64, (capacity, 3))
    g.graph.set_type(number, TensorProto.INT64, (1,))
    g.bound(to, {0: Length(number, capacity)})
    g.natural.add(to)


def unique(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Unique: sort, and choose each element that differs from the one before."""
    options = attributes(node)
    x = node.input[0]
    lengths = dict(g.lengths.get(x, {}))
    axis = options.get("axis")
    shape = g.shape(x)
    if axis is None:
        if len(shape) != 1 and lengths:
            g.refuse("expected a vector of known rank")
        x, axis = g.op("Reshape", x, g.ints(-1)), 0
        shape = g.shape(x)
    axis = int(axis) % len(shape)
    if set(lengths) - {axis}:
        g.refuse("expected one axis whose length is only known at run time")
    extent = shape[axis]
    inner = math.prod(shape) // extent if extent else 0
    if not 1 <= inner <= MAX_COLUMNS:
        g.refuse(f"expected slices of 1 to {MAX_COLUMNS} elements, got {inner}")
    order_of_axes = [axis, *(i for i in range(len(shape)) if i != axis)]
    rows = x if axis == 0 else g.op("Transpose", x, perm=order_of_axes)
    columns = [
        g.op("Gather", g.op("Reshape", rows, g.ints(extent, inner)), g.constant(i, np.int64), axis=1)
        for i in range(inner)
    ]
    length = lengths.get(axis)
    if length is not None:
        # What is not real sorts behind everything else.
        columns.insert(0, g.cast(g.op("Not", g.there(length)), TensorProto.INT32))
    if any(g.dtype(column).kind == "b" for column in columns):
        columns = [g.cast(column, TensorProto.INT32) for column in columns]
    order = _sorted(g, columns[-1])
    for column in reversed(columns[:-1]):
        order = g.op("Gather", order, _sorted(g, g.op("Gather", column, order, axis=0)), axis=0)
    fresh = _first_of_its_kind(g, [g.op("Gather", column, order, axis=0) for column in columns], extent)
    if length is not None:
        fresh = g.op("And", fresh, g.there(length))
    starts, count = g.positions(fresh)
    firsts = g.op("Gather", order, starts, axis=0)
    total = length.name if length is not None else g.ints(extent)
    ends = g.op("Concat", g.op("Slice", starts, g.ints(1), g.ints(extent), g.ints(0)), g.ints(0), axis=0)
    last = g.op("GreaterOrEqual", g.iota(extent), g.op("Sub", count.name, g.ints(1)))
    sizes = g.op("Sub", g.op("Where", last, total, ends), starts)
    kind = g.op("Sub", g.op("CumSum", g.cast(fresh, TensorProto.INT64), g.constant(0, np.int64)), g.ints(1))
    zeros = g.constant(np.zeros(extent), np.int64)
    if not options.get("sorted", 1):
        # In the order in which they first appear.
        by_place = g.op("Where", g.there(count), firsts, g.ints(extent))
        again = _sorted(g, by_place)
        rank = g.op("ScatterElements", zeros, again, g.iota(extent), axis=0)
        kind = g.op("Gather", rank, g.op("Max", kind, g.ints(0)), axis=0)
        firsts, sizes = (g.op("Gather", each, again, axis=0) for each in (firsts, sizes))
    results = [
        (g.op("Gather", x, firsts, axis=axis), {axis: count}),
        (firsts, {0: count}),
        (g.op("ScatterElements", zeros, order, kind, axis=0), {} if length is None else {0: length}),
        (sizes, {0: count}),
    ]
    for to, (value, made) in zip(node.output, results, strict=False):
        if to:
            g.op("Identity", value, to=to)
            g.bound(to, made)
            g.natural.add(to)
    g.natural.discard(node.output[0])


def _sorted(g: PaddedGraph, column: str) -> str:
    """The order of a vector's elements; of equal ones, the first comes first."""
    extent = g.shape(column)[0]
    if g.elem_type(column) not in _SORTED:
        column = g.cast(column, TensorProto.INT64)
    values, order = (g.graph.fresh(f"{column}/sorted") for _ in range(2))
    g.add(helper.make_node("TopK", [column, g.ints(extent)], [values, order], axis=0, largest=0, sorted=1))
    return order


def _first_of_its_kind(g: PaddedGraph, columns: list[str], extent: int) -> str:
    """Which rows of sorted columns differ from the row before, BOOL [extent]."""
    first = g.constant([True], np.bool_)
    if extent == 1:
        return first
    differs = ""
    for column in columns:
        after = g.op("Slice", column, g.ints(1), g.ints(extent), g.ints(0))
        before = g.op("Slice", column, g.ints(0), g.ints(extent - 1), g.ints(0))
        one = g.op("Not", g.op("Equal", after, before))
        differs = g.op("Or", differs, one) if differs else one
    return g.op("Concat", first, differs, axis=0)


def make_range(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Range up to a length."""
    start, limit, delta = (g.entries(name) for name in node.input)
    if start is None or limit is None or delta is None or delta != (1,):
        g.refuse("its length depends on values that are only known at run time, and nothing bounds it")
    [first], [last] = start, limit
    if isinstance(first, Length) and g.is_negative(first):
        g.refuse("it may begin below zero, and negative places count from the end")
    least, most = (0 if isinstance(first, Length) else first), extents((last,))[0]
    if least < 0 or most <= least:
        g.refuse("its length depends on values that are only known at run time, and nothing bounds it")
    g.limit(most)
    count = g.arithmetic("Sub", last, first, most - least)
    if isinstance(count, Length) and (least or isinstance(first, Length) or g.is_negative(count)):
        count = g.arithmetic("Max", count, 0, most - least)
    extent = extents((count,))[0]
    if extent < 1:
        g.refuse("it makes nothing")
    to, dtype = node.output[0], g.dtype(node.input[1])
    if isinstance(first, Length):
        begin = g.cast(g.op("Reshape", first.name, g.ints()), g.elem_type(node.input[1]))
        g.op("Add", g.constant(np.arange(extent), dtype), begin, to=to)
    else:
        g.op("Identity", g.constant(np.arange(first, first + extent), dtype), to=to)
    if isinstance(count, Length):
        g.bound(to, {0: count})
    g.natural.add(to)


def constant_of_shape(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """ConstantOfShape with lengths in its shape."""
    entries = g.entries(node.input[0])
    if entries is None:
        g.refuse("its shape depends on values that are only known at run time, and nothing bounds it")
    g.copy(node, [g.ints(*extents(entries))])
    g.bound(node.output[0], lengths_of(entries))


def extents(entries: tuple[Entry, ...]) -> list[int]:
    """Padded extents."""
    return [entry if isinstance(entry, int) else entry.capacity for entry in entries]


def lengths_of(entries: tuple[Entry, ...]) -> dict[int, Length]:
    """Axes with lengths among dimensions."""
    return {axis: entry for axis, entry in enumerate(entries) if isinstance(entry, Length)}
