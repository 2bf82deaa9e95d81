"""Operators that move elements: each says where the lengths of its inputs go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from builder.importer.bounded.length import Entry, Length
from builder.importer.bounded.padded_graph import PaddedGraph
from builder.importer.bounded.sources import extents, lengths_of, multiplied
from builder.importer.onnx_graph import attributes
from builder.importer.rewrites.replacement import input_name

# Ends of a Slice beyond this mean the end of the axis.
_END: Final = 1 << 31


def shape(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Shape of a padded value: its true dimensions."""
    options = attributes(node)
    dims = g.dims(node.input[0])[slice(options.get("start", 0), options.get("end"))]
    if not dims:
        g.copy(node)
        return
    g.op("Concat", *(g.scalar(dim) for dim in dims), to=node.output[0], axis=0)
    g.contents[node.output[0]] = dims


def size(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Size of a padded value."""
    total: Entry = 1
    for dim in g.dims(node.input[0]):
        most = math.prod(extents((total, dim)))
        total = g.arithmetic("Mul", total, dim, most)
    g.op("Reshape", g.scalar(total), g.ints(), to=node.output[0])
    g.contents[node.output[0]] = (total,)


def transpose(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Transpose: lengths move with their axes."""
    rank = len(g.shape(node.input[0]))
    order = list(attributes(node).get("perm", reversed(range(rank))))
    g.copy(node)
    lengths = g.lengths.get(node.input[0], {})
    g.bound(node.output[0], {order.index(axis): length for axis, length in lengths.items()})
    if (own := g.contents.get(node.input[0])) is not None:
        turned = np.array(own, object).reshape(g.shape(node.input[0])).transpose(order)
        g.contents[node.output[0]] = tuple(turned.reshape(-1))


def unsqueeze(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Unsqueeze: new axes push lengths back."""
    x, to = node.input[0], node.output[0]
    axes = g.entries(node.input[1])
    g.copy(node)
    rank = len(g.shape(to))
    if axes is None:
        g.refuse("its axes depend on values that are only known at run time")
    new = {int(axis) % rank for axis in axes if isinstance(axis, int)}
    old = [axis for axis in range(rank) if axis not in new]
    g.bound(to, {old[axis]: length for axis, length in g.lengths.get(x, {}).items()})
    pass_on(g, x, to)


def squeeze(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Squeeze: never an axis whose length is only known at run time, unless that is 1 at most."""
    x, to = node.input[0], node.output[0]
    lengths = g.lengths.get(x, {})
    dims = g.shape(x)
    name = input_name(node, 1)
    entries = (
        g.entries(name)
        if name
        else tuple(axis for axis, extent in enumerate(dims) if extent == 1 and axis not in lengths)
    )
    if entries is None or any(isinstance(entry, Length) for entry in entries):
        g.refuse("its axes depend on values that are only known at run time")
    gone = sorted({int(axis) % len(dims) for axis in entries if isinstance(axis, int)})
    if any(dims[axis] != 1 for axis in gone):
        g.refuse("it removes an axis whose length is only known at run time")
    g.op("Squeeze", x, g.ints(*gone), to=to) if gone else g.op("Identity", x, to=to)
    kept = [axis for axis in range(len(dims)) if axis not in gone]
    g.bound(to, {kept.index(axis): length for axis, length in lengths.items() if axis in kept})
    pass_on(g, x, to)


def pass_on(g: PaddedGraph, x: str, to: str) -> None:
    """Record that a value has the elements of another: a shape stays one, and indices stay positions."""
    if x in g.contents:
        g.contents[to] = g.contents[x]
    if x in g.natural:
        g.natural.add(to)


def gather(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Gather along any axis, with indices of any length."""
    x, indices = node.input
    rank = len(g.shape(x))
    axis = int(attributes(node).get("axis", 0)) % rank
    own = g.lengths.get(x, {})
    if axis in own:
        indices = natural(g, indices, own[axis])
    g.copy(node, [x, indices])
    width = len(g.shape(indices))
    lengths = {place if place < axis else place + width - 1: v for place, v in own.items() if place != axis}
    lengths |= {axis + place: length for place, length in g.lengths.get(indices, {}).items()}
    g.bound(node.output[0], lengths)
    entries, places = g.entries(x), g.entries(indices)
    if entries is not None and places is not None and rank == 1 and node.input[0] in g.contents:
        chosen = [entries[place] for place in places if isinstance(place, int)]
        if len(chosen) == len(places):
            g.contents[node.output[0]] = tuple(chosen)


def natural(g: PaddedGraph, indices: str, length: Entry) -> str:
    """Indices that count from the front: a negative one counts from the true end, not from the padded one."""
    value = g.graph.constant(indices)
    if indices in g.natural or (value is not None and (value >= 0).all()):
        return indices
    kind = g.elem_type(indices)
    last = g.cast(g.scalar(length), kind)
    if not g.shape(indices):
        last = g.op("Reshape", last, g.ints())
    negative = g.op("Less", indices, g.constant(0, g.dtype(indices)))
    made = g.op("Where", negative, g.op("Add", indices, last), indices)
    g.bound(made, g.lengths.get(indices, {}))
    return made


def natural_places(g: PaddedGraph, x: str, indices: str, depth: int) -> str:
    """Coordinates [..., depth] that count from the front, as `natural` says of indices."""
    value = g.graph.constant(indices)
    if indices in g.natural or (value is not None and (value >= 0).all()):
        return indices
    ends = g.op("Concat", *(g.scalar(dim) for dim in g.dims(x)[:depth]), axis=0)
    whole = g.cast(ends, g.elem_type(indices))
    negative = g.op("Less", indices, g.constant(0, g.dtype(indices)))
    made = g.op("Where", negative, g.op("Add", indices, whole), indices)
    g.bound(made, g.lengths.get(indices, {}))
    return made


def gather_nd(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """GatherND: its output is as long as its indices."""
    x, indices = node.input
    lengths, own = g.lengths.get(indices, {}), g.lengths.get(x, {})
    rank = len(g.shape(indices))
    depth = g.shape(indices)[-1]
    if attributes(node).get("batch_dims", 0) or rank - 1 in lengths:
        g.refuse("expected indices without batches")
    if any(axis < depth for axis in own):
        indices = natural_places(g, x, indices, depth)
    g.copy(node, [x, indices])
    rest = {rank - 1 + axis - depth: length for axis, length in own.items() if axis >= depth}
    g.bound(node.output[0], {**lengths, **rest})


def gather_elements(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """GatherElements: its output is as long as its indices."""
    x, indices = node.input
    axis = int(attributes(node).get("axis", 0)) % len(g.shape(x))
    lengths = g.lengths.get(indices, {})
    if (length := g.lengths.get(x, {}).get(axis)) is not None:
        indices = natural(g, indices, length)
    g.copy(node, [x, indices])
    g.bound(node.output[0], lengths)


def scatter(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """ScatterElements and ScatterND: padding is written behind the end, and cut off."""
    x, indices, updates = node.input
    elements = node.op_type == "ScatterElements"
    axis = int(attributes(node).get("axis", 0)) % len(g.shape(x)) if elements else 0
    own = dict(g.lengths.get(x, {}))
    mask = g.mask(indices) or g.mask(updates)
    extent = g.shape(x)[axis]
    # With a place behind the end, a negative index would count from there.
    if elements and (axis in own or mask):
        indices = natural(g, indices, own.get(axis, extent))
    elif not elements and (own or mask):
        indices = natural_places(g, x, indices, g.shape(indices)[-1])
    if not mask:
        g.copy(node, [x, indices, updates])
        g.bound(node.output[0], own)
        return
    outside = [extent] if elements else [extent] + [0] * (g.shape(indices)[-1] - 1)
    kept = g.op("Where", mask, indices, g.constant(outside, g.dtype(indices)))
    room = list(g.shape(x))
    room[axis] = 1
    wide = g.op("Concat", x, g.constant(np.zeros(room), g.dtype(x)), axis=axis)
    made = g.graph.fresh(f"{node.output[0]}/wide")
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:], copy.output[:] = [wide, kept, updates], [made]
    g.add(copy)
    g.op("Slice", made, g.ints(0), g.ints(extent), g.ints(axis), to=node.output[0])
    g.bound(node.output[0], own)


def concat(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Concat: along a padded axis, the real elements are moved together."""
    to = node.output[0]
    rank = len(g.shape(node.input[0]))
    axis = int(attributes(node)["axis"]) % rank
    parts = [g.lengths.get(name, {}) for name in node.input]
    others: dict[int, Length] = {}
    for part in parts:
        others |= {place: length for place, length in part.items() if place != axis}
    if any(part.get(place) != length for part in parts for place, length in others.items()):
        g.refuse("its inputs have different lengths")
    if not any(axis in part for part in parts):
        g.copy(node)
        g.bound(to, others)
        entries = [g.entries(name) for name in node.input]
        if rank == 1 and all(entry is not None for entry in entries):
            g.contents[to] = tuple(one for entry in entries for one in (entry or ()))
        if all(name in g.natural for name in node.input):
            g.natural.add(to)
        return
    whole = g.op("Concat", *node.input, axis=axis)
    joined = tuple(g.dims(name)[axis] for name in node.input)
    places, count = _joined(g, joined)
    g.op("Gather", whole, places, to=to, axis=axis)
    g.bound(to, {**others, axis: count})
    if all(name in g.natural for name in node.input):
        g.natural.add(to)


def _joined(g: PaddedGraph, parts: tuple[Entry, ...]) -> tuple[str, Length]:
    """The indices that gather the valid elements of parts which are concatenated at their capacities.

    Result: the indices, INT64 [sum of capacities], after the last valid element any that exist; and how many
        elements are valid: values of equal parts have equal lengths.
    """
    total = sum(extents(parts))

    def make() -> tuple[str, Length]:
        places = whole = g.iota(total)
        end: Entry = 0
        for part in parts:
            end = g.arithmetic("Add", end, part, sum(extents((end, part))))
            if isinstance(part, Length):
                # Elements behind this part's end are as much further back as it has room.
                room = g.op("Sub", g.ints(part.capacity), part.name)
                behind = g.op("GreaterOrEqual", whole, g.scalar(end))
                places = g.op("Add", places, g.op("Where", behind, room, g.ints(0)))
        assert isinstance(end, Length)
        return g.op("Min", places, g.ints(total - 1)), end

    places, count = g.derived(("joined", parts), make)
    return str(places), count


def split(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Split along an axis of known extent."""
    axis = int(attributes(node).get("axis", 0)) % len(g.shape(node.input[0]))
    lengths = g.lengths.get(node.input[0], {})
    if axis in lengths:
        g.refuse("it splits an axis whose length is only known at run time")
    g.copy(node)
    for name in node.output:
        g.bound(name, lengths)


def pad(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Pad of axes of known extent, or with zeros behind what there is, up to a known extent."""
    x, to = node.input[0], node.output[0]
    lengths = dict(g.lengths.get(x, {}))
    pads, axes = g.entries(node.input[1]), g.entries(input_name(node, 3))
    rank = len(g.shape(node.input[0]))
    if pads is None:
        g.refuse("its pads depend on values that are only known at run time")
    places = list(range(rank)) if axes is None else [int(a) % rank for a in axes if isinstance(a, int)]
    known = list(pads)
    for index, axis in enumerate(places):
        begin, end = pads[index], pads[index + len(places)]
        if axis not in lengths or begin == end == 0:
            continue
        value = input_name(node, 2)
        is_zero = not value or ((fill := g.graph.constant(value)) is not None and not fill.any())
        is_constant = attributes(node).get("mode", b"constant") in (b"constant", "constant")
        total = g.filled_up(lengths[axis], end) if begin == 0 and is_zero and is_constant else None
        if total is None:
            g.refuse("it pads an axis whose length is only known at run time")
        x = g.filled(x, 0, [axis])
        known[index + len(places)] = total - lengths.pop(axis).capacity
    if known == list(pads):
        g.copy(node)
    else:
        numbers = [entry for entry in known if isinstance(entry, int)]
        if len(numbers) != len(known):
            g.refuse("its pads depend on values that are only known at run time")
        g.op("Pad", x, g.ints(*numbers), *(["", node.input[3]] if axes is not None else []), to=to)
    g.bound(to, lengths)


def tile(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Tile: a padded axis is not repeated; an axis of extent 1 may be repeated as often as a length."""
    x, to = node.input[0], node.output[0]
    repeats = g.entries(node.input[1])
    if repeats is None:
        g.refuse("its repeats depend on values that are only known at run time, and nothing bounds them")
    lengths = dict(g.lengths.get(x, {}))
    for axis, (extent, times) in enumerate(zip(g.shape(x), repeats, strict=True)):
        if axis in lengths and times != 1:
            g.refuse("it repeats an axis whose length is only known at run time")
        if isinstance(times, Length):
            lengths[axis] = multiplied(g, times, extent)
    g.op("Tile", x, g.ints(*extents(repeats)), to=to)
    g.bound(to, lengths)


def expand(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Expand to a shape with lengths."""
    x, to = node.input[0], node.output[0]
    target = g.entries(node.input[1])
    if target is None:
        g.refuse("its shape depends on values that are only known at run time, and nothing bounds it")
    own = g.dims(x)
    rank = max(len(own), len(target))
    dims: list[Entry] = []
    for a, b in zip((*[1] * (rank - len(own)), *own), (*[1] * (rank - len(target)), *target), strict=True):
        if a != 1 and b not in (1, a):
            g.refuse("its shape does not follow from that of its input")
        dims.append(b if a == 1 else a)
    g.op("Expand", x, g.ints(*extents(tuple(dims))), to=to)
    g.bound(to, lengths_of(tuple(dims)))


def cut(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Slice: along a padded axis, or up to an end that is computed."""
    x, to = node.input[0], node.output[0]
    rank = len(g.shape(x))
    starts, ends = g.entries(node.input[1]), g.entries(node.input[2])
    count = g.shape(node.input[1])[0]
    axes, steps = (
        g.entries(name) if (name := input_name(node, index)) else default
        for index, default in ((3, tuple(range(count))), (4, (1,) * count))
    )
    if axes is None or steps is None:
        g.refuse("its axes or steps depend on values that are only known at run time")
    lengths = dict(g.lengths.get(x, {}))
    value = x
    known: list[tuple[int, int, int, int]] = []
    for index in range(count):
        axis, step = axes[index], steps[index]
        if not isinstance(axis, int) or not isinstance(step, int):
            g.refuse("its axes depend on values that are only known at run time")
        axis %= rank
        start: Entry | None = None if starts is None else starts[index]
        end: Entry | None = None if ends is None else ends[index]
        if axis not in lengths and isinstance(start, int) and isinstance(end, int):
            known.append((start, end, axis, step))
            continue
        if step != 1:
            g.refuse("expected steps of 1 along an axis whose length is only known at run time")
        dim: Entry = lengths.pop(axis, g.shape(value)[axis])
        value, made = _cut(
            g, value, axis, dim, _bound(g, node.input[1], index, start), _bound(g, node.input[2], index, end)
        )
        if isinstance(made, Length):
            lengths[axis] = made
    if known:
        parts = [g.ints(*column) for column in zip(*known, strict=True)]
        value = g.op("Slice", value, *parts)
    g.op("Identity", value, to=to)
    g.bound(to, lengths)
    if (own := g.contents.get(x)) is not None and len(known) == count == 1:
        first, last, axis, step = known[0]
        whole = np.array(own, object).reshape(g.shape(x)).swapaxes(0, axis)
        part = whole[first : last if abs(last) < _END else None : step]
        g.contents[to] = tuple(part.swapaxes(0, axis).reshape(-1))
    if x in g.natural:
        g.natural.add(to)


def _bound(g: PaddedGraph, name: str, index: int, entry: Entry | None) -> Entry | str:
    """A start or an end: a number, a length, or the name of a value that is only known at run time."""
    if entry is not None:
        return entry

    def make() -> str:
        vector = g.cast(name, TensorProto.INT64)
        return g.op("Slice", vector, g.ints(index), g.ints(index + 1), g.ints(0))

    return str(g.derived(("bound", name, index), make))


def _cut(
    g: PaddedGraph, x: str, axis: int, dim: Entry, start: Entry | str, end: Entry | str
) -> tuple[str, Entry]:
    """Cut an axis from `start` to `end`; return the value and the axis's new length."""
    extent = dim if isinstance(dim, int) else dim.capacity
    if isinstance(end, Length) and g.is_negative(end):
        end = end.name  # then it counts from the end
    if isinstance(start, int) and start >= 0:
        most = extent
        if isinstance(end, Length):
            most = min(extent, end.capacity)
        elif isinstance(end, int):
            most = min(end, extent) if end >= 0 else extent + end
        most -= start
        if most < 1:
            g.refuse("it cuts off everything")
        value = x
        if start or most < extent:
            value = g.op("Slice", x, g.ints(start), g.ints(start + most), g.ints(axis))
        if isinstance(end, int) and end >= _END:
            last: Entry = dim
        elif isinstance(end, int) and end < 0:
            last = _positive(g, g.arithmetic("Add", dim, end, extent), extent)
        elif isinstance(end, str):
            last = Length(_resolved(g, end, dim), extent)
        else:
            last = g.arithmetic("Min", dim, end, min(extent, most + start))
        if not start:
            return value, last if isinstance(last, int) else Length(last.name, most)
        return value, _positive(g, g.arithmetic("Sub", last, start, most), most)
    first = _resolved(g, g.scalar(start) if not isinstance(start, str) else start, dim)
    last_name = _resolved(g, g.scalar(end) if not isinstance(end, str) else end, dim)
    most = min(extent, -start) if isinstance(start, int) else extent
    count = g.op("Max", g.op("Sub", last_name, first), g.ints(0))
    places = g.op("Min", g.op("Add", g.iota(most), first), g.ints(extent - 1))
    return g.op("Gather", x, places, axis=axis), Length(count, most)


def _positive(g: PaddedGraph, entry: Entry, capacity: int) -> Entry:
    return g.arithmetic("Max", entry, 0, capacity)


def _resolved(g: PaddedGraph, name: str, dim: Entry) -> str:
    """A start or an end as a position from 0 to the length, INT64 [1]."""

    def make() -> str:
        whole = g.scalar(dim)
        negative = g.op("Less", name, g.ints(0))
        from_end = g.op("Where", negative, g.op("Add", name, whole), name)
        return g.op("Max", g.op("Min", from_end, whole), g.ints(0))

    return str(g.derived(("resolved", name, dim), make))


def moved(lengths: Mapping[int, Length], axes: Sequence[int], *, keep: bool) -> dict[int, Length]:
    """Lengths after a reduction over some axes."""
    left = {axis: length for axis, length in lengths.items() if axis not in axes}
    if keep:
        return left
    return {axis - sum(gone < axis for gone in axes): length for axis, length in left.items()}
