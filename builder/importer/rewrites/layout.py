"""Operators that only move elements, in the forms that the front end lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx

from builder.errors import ModelError
from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node
from builder.importer.rewrites.replacement import Replacement, input_name

# Elements along an axis that wraps around: its places are a constant.
MAX_WRAPPED: Final = 1 << 24


def space_to_depth(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """SpaceToDepth in CRD order: a reshape and a transposition."""
    options = attributes(node)
    shape = graph.shape_of(node.input[0])
    if options.get("mode", "DCR") != "CRD" or shape is None:
        return None
    batch, channels, height, width = shape
    block = int(options["blocksize"])
    new = Replacement(node, graph)
    split = new.ints(batch, channels, height // block, block, width // block, block)
    x = new.op("Transpose", new.op("Reshape", node.input[0], split), perm=[0, 1, 3, 5, 2, 4])
    joined = new.ints(batch, channels * block * block, height // block, width // block)
    new.op("Reshape", x, joined, to=node.output[0])
    return new.nodes


def grid_sample(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """GridSample that reflects at the centres of corners: an axis of one element gets a second one.

    TVM divides by the distance of the corners, which is 0. Between two equal elements, all numbers are equal.
    """
    options, shape = attributes(node), graph.shape_of(node.input[0])
    reflects = options.get("padding_mode") == "reflection" and options.get("align_corners", 0)
    if shape is None or not reflects or 1 not in shape[2:]:
        return None
    new = Replacement(node, graph)
    twice = [1, 1, *(2 if extent == 1 else 1 for extent in shape[2:])]
    x = new.op("Tile", node.input[0], new.ints(*twice))
    new.op("GridSample", x, node.input[1], to=node.output[0], **options)
    return new.nodes


def reverse_sequence(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ReverseSequence with constant lengths: a GatherND."""
    options = attributes(node)
    shape = graph.shape_of(node.input[0])
    lengths = graph.constant(node.input[1])
    if shape is None or lengths is None:
        return None
    batch_axis, time_axis = int(options.get("batch_axis", 1)), int(options.get("time_axis", 0))
    batch, steps = shape[batch_axis], shape[time_axis]
    where = np.tile(np.arange(steps), (batch, 1))
    for row, length in enumerate(lengths):
        where[row, :length] = where[row, :length][::-1]
    rows = np.tile(np.arange(batch)[:, None], (1, steps))
    indices = np.stack([rows, where], axis=-1)
    new = Replacement(node, graph)
    x = node.input[0]
    if batch_axis == 1:
        order = [1, 0, *range(2, len(shape))]
        gathered = new.op("GatherND", new.op("Transpose", x, perm=order), new.constant(indices, np.int64))
        new.op("Transpose", gathered, to=node.output[0], perm=order)
    else:
        new.op("GatherND", x, new.constant(indices, np.int64), to=node.output[0])
    return new.nodes


def unsqueeze(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Unsqueeze along one axis, a scalar as PyTorch writes it: a list of one."""
    axis = graph.constant(name) if (name := input_name(node, 1)) else None
    if axis is None or axis.ndim:
        return None
    new, copy = Replacement(node, graph), copy_node(node)
    copy.input[1] = new.ints(int(axis))
    return [copy]


def split_without_empty(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Split with empty parts: a Slice for each of the other parts.

    Parts that nothing reads get names: ONNX Runtime crashes where the first has none.
    """
    if not all(node.output):
        named = copy_node(node)
        named.output[:] = [name or graph.fresh(f"{node.name}/unread") for name in node.output]
        return [named]
    shapes = [graph.shape_of(name) for name in node.output]
    if not any(shape is not None and 0 in shape for shape in shapes) or any(
        shape is None for shape in shapes
    ):
        return None
    axis = int(attributes(node).get("axis", 0))
    new = Replacement(node, graph)
    found = graph.type_of(node.input[0])
    start = 0
    for name, shape in zip(node.output, shapes, strict=False):
        assert shape is not None and found is not None
        end = start + shape[axis]
        if 0 in shape:
            new.op("Identity", new.constant(np.zeros(shape), found.dtype), to=name)
        else:
            new.op("Slice", node.input[0], new.ints(start), new.ints(end), new.ints(axis), to=name)
        start = end
    return new.nodes


def concat_without_empty(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Concat with empty parts: a Concat of the other parts."""
    parts = [name for name in node.input if 0 not in (graph.shape_of(name) or (1,))]
    if len(parts) == len(node.input) or not parts:
        return None
    new = Replacement(node, graph)
    new.op("Concat", *parts, to=node.output[0], axis=int(attributes(node)["axis"]))
    return new.nodes


def pad(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Pad that wraps around: a Gather along each padded axis, of what negative widths leave."""
    shape, widths = graph.shape_of(node.input[0]), graph.constant(input_name(node, 1))
    if attributes(node).get("mode", "constant") != "wrap" or shape is None or widths is None:
        return None
    places = graph.constant(name) if (name := input_name(node, 3)) else np.arange(len(shape))
    if places is None or widths.size != 2 * places.size:
        return None
    new, x = Replacement(node, graph), node.input[0]
    for number, place in enumerate(places.tolist()):
        before, after = int(widths[number]), int(widths[number + places.size])
        axis = int(place) % len(shape)
        first, last = max(0, -before), shape[axis] - max(0, -after)
        left, added = max(0, last - first), max(before, 0) + max(after, 0)
        if left == 0 and added:
            raise ModelError(
                f"Pad ({node.name}): expected elements to wrap around along axis {axis}, got none",
                hint="pad axes that have elements, or with the mode constant",
            )
        if left + added > MAX_WRAPPED:
            return None
        indices = first + np.arange(-max(before, 0), left + max(after, 0)) % max(left, 1)
        if indices.tolist() != list(range(shape[axis])):
            x = new.op("Gather", x, new.constant(indices, np.int64), axis=axis)
    new.op("Identity", x, to=node.output[0])
    return new.nodes
