"""Operators that only move elements, in the forms that the front end lacks."""

from __future__ import annotations

from typing import Final

import numpy as np

from builder.errors import ModelError
from builder.importer.onnx_graph import copy_node
from builder.importer.rewrites.replacement import Nodes, Replacement

# Elements along an axis that wraps around: its places are a constant.
MAX_WRAPPED: Final = 1 << 24


def space_to_depth(new: Replacement) -> Nodes | None:
    """SpaceToDepth in CRD order: a reshape and a transposition."""
    options = new.attributes
    shape = new.shape_of(new.inputs[0])
    if options.get("mode", "DCR") != "CRD":
        return None
    batch, channels, height, width = shape
    block = int(options["blocksize"])
    split = new.ints(batch, channels, height // block, block, width // block, block)
    x = new.op("Transpose", new.op("Reshape", new.inputs[0], split), perm=[0, 1, 3, 5, 2, 4])
    joined = new.ints(batch, channels * block * block, height // block, width // block)
    return new.result("Reshape", x, joined)


def grid_sample(new: Replacement) -> Nodes | None:
    """GridSample that reflects at the centres of corners: an axis of one element gets a second one.

    TVM divides by the distance of the corners, which is 0. Between two equal elements, all numbers are equal.
    """
    options, shape = new.attributes, new.shape_of(new.inputs[0])
    if options.get("padding_mode") == "reflection" and options.get("mode") == "nearest":
        return _nearest_reflected(new)
    reflects = options.get("padding_mode") == "reflection" and options.get("align_corners", 0)
    if not reflects or 1 not in shape[2:]:
        return None
    twice = [1, 1, *(2 if extent == 1 else 1 for extent in shape[2:])]
    x = new.op("Tile", new.inputs[0], new.ints(*twice))
    return new.result("GridSample", x, new.inputs[1], **options)


def _nearest_reflected(new: Replacement) -> Nodes:
    """GridSample of the nearest elements, within borders: places are reflected here.

    ONNX rounds a place before it is reflected, TVM behind it: they differ half-way between two elements.
    """
    grid, dtype = new.inputs[1], new.type_of(new.inputs[1]).dtype
    sizes = np.array(new.shape_of(new.inputs[0])[:1:-1])  # places are x, y, z
    edge = 0 if new.attributes.get("align_corners", 0) else 1  # half an element is behind the last centre
    half, one = new.constant(0.5, dtype), new.constant(1, dtype)
    span, period = (new.constant(np.maximum(n, 1), dtype) for n in (sizes - 1 + edge, 2 * (sizes - 1 + edge)))
    last = new.constant(2 * (sizes - 1) + edge, dtype)
    place = new.op("Sub", new.op("Mul", new.op("Add", grid, one), span), new.constant(edge, dtype))
    place = new.op("Round", new.op("Mul", place, half))
    place = new.op("Sub", place, new.op("Mul", new.op("Floor", new.op("Div", place, period)), period))
    place = new.op("Min", place, new.op("Sub", last, place))
    place = new.op("Add", new.op("Add", place, place), new.constant(edge, dtype))
    place = new.op("Sub", new.op("Div", place, span), one)
    return new.result("GridSample", new.inputs[0], place, **{**new.attributes, "padding_mode": "border"})


def reverse_sequence(new: Replacement) -> Nodes:
    """ReverseSequence: a GatherND, whose places are constants if the lengths are."""
    options = new.attributes
    shape = new.shape_of(new.inputs[0])
    batch_axis, time_axis = int(options.get("batch_axis", 1)), int(options.get("time_axis", 0))
    batch, steps = shape[batch_axis], shape[time_axis]
    rows, times = (place[..., None] for place in np.indices((batch, steps)))
    constant = new.graph.constant(new.inputs[1])
    if constant is not None:
        ends = constant.reshape(-1, 1, 1)
        where = np.where(times < ends, ends - 1 - times, times)
        indices = new.constant(np.concatenate([rows, where], -1), np.int64)
    else:
        step, lengths = new.constant(times, np.int64), new.op("Reshape", new.inputs[1], new.ints(-1, 1, 1))
        flipped = new.op("Sub", new.op("Sub", lengths, new.ints(1)), step)
        places = new.op("Where", new.op("Less", step, lengths), flipped, step)
        indices = new.op("Concat", new.constant(rows, np.int64), places, axis=-1)
    if batch_axis == 0:
        return new.result("GatherND", new.inputs[0], indices)
    order = [1, 0, *range(2, len(shape))]
    gathered = new.op("GatherND", new.op("Transpose", new.inputs[0], perm=order), indices)
    return new.result("Transpose", gathered, perm=order)


def unsqueeze(new: Replacement) -> Nodes | None:
    """Unsqueeze along one axis, a scalar as PyTorch writes it: a list of one."""
    axis = new.graph.constant(name) if (name := new.input(1)) else None
    if axis is None or axis.ndim:
        return None
    copy = copy_node(new.node)
    copy.input[1] = new.ints(int(axis))
    return [copy]


def split_without_empty(new: Replacement) -> Nodes | None:
    """Split with empty parts: a Slice for each of the other parts.

    Parts that nothing reads get names: ONNX Runtime crashes where the first has none.
    """
    if not all(new.outputs):
        named = copy_node(new.node)
        named.output[:] = [name or new.graph.fresh(f"{new.node.name}/unread") for name in new.outputs]
        return [named]
    shapes = [new.graph.shape_of(name) for name in new.outputs]
    if not any(shape is not None and 0 in shape for shape in shapes) or any(
        shape is None for shape in shapes
    ):
        return None
    axis = int(new.attributes.get("axis", 0))
    found = new.graph.type_of(new.inputs[0])
    start = 0
    for name, shape in zip(new.outputs, shapes, strict=False):
        assert shape is not None and found is not None
        end = start + shape[axis]
        if 0 in shape:
            new.op("Identity", new.constant(np.zeros(shape), found.dtype), to=name)
        else:
            new.op("Slice", new.inputs[0], new.ints(start), new.ints(end), new.ints(axis), to=name)
        start = end
    return new.nodes


def concat_without_empty(new: Replacement) -> Nodes | None:
    """Concat with empty parts: a Concat of the other parts."""
    parts = [name for name in new.inputs if 0 not in (new.graph.shape_of(name) or (1,))]
    if len(parts) == len(new.inputs) or not parts:
        return None
    return new.result("Concat", *parts, axis=int(new.attributes["axis"]))


def pad(new: Replacement) -> Nodes | None:
    """Pad that wraps around: a Gather along each padded axis, of what negative widths leave."""
    shape, widths = new.shape_of(new.inputs[0]), new.graph.constant(new.input(1))
    if new.attributes.get("mode", "constant") != "wrap" or widths is None:
        return None
    places = new.graph.constant(name) if (name := new.input(3)) else np.arange(len(shape))
    if places is None or widths.size != 2 * places.size:
        return None
    x = new.inputs[0]
    for number, place in enumerate(places.tolist()):
        before, after = int(widths[number]), int(widths[number + places.size])
        axis = int(place) % len(shape)
        first, last = max(0, -before), shape[axis] - max(0, -after)
        left, added = max(0, last - first), max(before, 0) + max(after, 0)
        if left == 0 and added:
            raise ModelError(
                f"Pad ({new.node.name}): expected elements to wrap around along axis {axis}, got none",
                hint="pad axes that have elements, or with the mode constant",
            )
        if left + added > MAX_WRAPPED:
            return None
        indices = first + np.arange(-max(before, 0), left + max(after, 0)) % max(left, 1)
        if indices.tolist() != list(range(shape[axis])):
            x = new.op("Gather", x, new.constant(indices, np.int64), axis=axis)
    return new.result("Identity", x)
