"""Gather and scatter: constant indices become slices, other indices are kept in bounds.

TVM's gathers and scatters read and write wherever the indices point. Indices come with requests, so every
index that is not constant is clipped to the tensor first: a wrong index then selects a wrong number but never
reaches other memory. Plain Gather is not clipped here: TVM has a mode for that, see `relax_cleanup`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from builder.errors import ModelError
from builder.importer.onnx_graph import OnnxGraph, copy_node
from builder.importer.rewrites.elementwise import reduce_nothing
from builder.importer.rewrites.replacement import Nodes, Replacement


def gather(new: Replacement) -> Nodes | None:
    """Gather with one constant index, or several consecutive ones: a Slice."""
    shape = new.shape_of(new.inputs[0])
    if 0 in shape:
        return None
    axis = int(new.attributes.get("axis", 0)) % len(shape)
    places = new.graph.constant(new.inputs[1])
    return None if places is None else _slice(new, axis, shape[axis], places)


def _slice(new: Replacement, axis: int, extent: int, places: NDArray[Any]) -> Nodes | None:
    """The Slice for one index or several consecutive ones; None for other indices."""
    if places.ndim > 1 or not places.size:
        return None
    rows = places.astype(np.int64).reshape(-1) % extent
    first = int(rows[0])
    if not np.array_equal(rows, np.arange(first, first + rows.size)):
        return None
    bounds = (new.ints(first), new.ints(first + rows.size), new.ints(axis))
    if places.ndim:
        new.op("Slice", new.inputs[0], *bounds, to=new.outputs[0])
    else:
        new.op("Squeeze", new.op("Slice", new.inputs[0], *bounds), new.ints(axis), to=new.outputs[0])
    return new.nodes


def slice_of_one(new: Replacement) -> Nodes | None:
    """Slice of one picture, whose place comes with a request, for a Resize: Gather (tf2onnx's CropAndResize).

    A place outside would leave nothing, which cannot be resized.
    """
    if (
        len(new.inputs) < 3
        or new.graph.is_constant(start := new.inputs[1])
        or new.graph.shape_of(start) != (1,)
    ):
        return None
    axes, steps = (
        new.graph.constant(new.inputs[at]) if new.input(at) else np.array([at - 3]) for at in (3, 4)
    )
    end = new.graph.maker_of(new.inputs[2])
    if end is None or end.op_type != "Add" or start not in end.input or axes is None or steps is None:
        return None
    count = new.graph.constant(end.input[1 if end.input[0] == start else 0])
    if (
        count is None
        or count.tolist() != [1]
        or steps.tolist() != [1]
        or not _is_resized(new.outputs[0], new.graph)
    ):
        return None
    return new.result("Gather", new.inputs[0], start, axis=int(axes[0]))


def _is_resized(name: str, graph: OnnxGraph) -> bool:
    """Whether a value is only resized, perhaps with its axes in another order."""
    readers = [node for node in graph.proto.node if name in node.input and node.op_type != "Shape"]
    return bool(readers) and all(
        node.op_type == "Resize" or (node.op_type == "Transpose" and _is_resized(node.output[0], graph))
        for node in readers
    )


def top_k(new: Replacement) -> Nodes | None:
    """TopK in any order: in the order of the values, which is one of them."""
    if new.attributes.get("sorted", 1):
        return None
    copy = copy_node(new.node)
    next(each for each in copy.attribute if each.name == "sorted").i = 1
    return [copy]


def one_hot(new: Replacement) -> Nodes | None:
    """OneHot with a constant depth: a comparison with each place of the new axis."""
    indices, depth = new.shape_of(new.inputs[0]), new.graph.constant(new.inputs[1])
    found = new.type_of(new.inputs[2])
    if depth is None or depth.size != 1 or found.dtype.kind == "b":
        return None
    given = depth.reshape(()).item()
    if not 1 <= given < 1 << 31:  # not even if it is NaN
        raise ModelError(
            f"OneHot ({new.node.name}): expected a depth of 1 or more, got {given}",
            hint="name the number of classes at the export: torch.nn.functional.one_hot(x, NUMBER)",
        )
    count = int(given)
    rank = len(indices) + 1
    axis = int(new.attributes.get("axis", -1)) % rank
    # Values without a fraction only; negative ones count from the end.
    place = new.op("Unsqueeze", new.cast(new.inputs[0], TensorProto.INT64), new.ints(axis))
    negative = new.op("Less", place, new.ints(0))
    place = new.op("Where", negative, new.op("Add", place, new.ints(count)), place)
    places = np.arange(count).reshape([-1 if i == axis else 1 for i in range(rank)])
    hot = new.op("Equal", place, new.constant(places, np.int64))
    off, on = (new.op("Gather", new.inputs[2], new.ints(i)) for i in (0, 1))
    return new.result("Where", hot, on, off)


def reduce_sum(new: Replacement) -> Nodes | None:
    """ReduceSum that counts a mask whose places a NonZero lists (PyTorch: `x[mask] = v`): their number."""
    cast, rank = new.graph.maker_of(new.inputs[0]), len(new.graph.shape_of(new.inputs[0]) or ())
    given = new.input(1)
    axes = new.graph.constant(given) if given else np.arange(rank)
    is_whole = rank and axes is not None and len({*(axes % rank).tolist()}) == rank
    is_nothing = not given and new.attributes.get("noop_with_empty_axes", 0)
    if cast is None or cast.op_type != "Cast" or not is_whole or is_nothing:
        return reduce_nothing(new)
    mask, found = _origin(cast.input[0], new.graph), new.graph.type_of(new.inputs[0])
    before = itertools.takewhile(lambda each: each.output != new.outputs, new.graph.proto.node)
    places = [
        each for each in before if each.op_type == "NonZero" and _origin(each.input[0], new.graph) == mask
    ]
    kind = new.graph.type_of(mask)
    if not places or kind is None or found is None or (kind.elem_type, found.elem_type) != _COUNTED:
        return reduce_nothing(new)
    count = new.op("Gather", new.op("Shape", places[0].output[0]), new.ints(1))
    shape = [1] * (rank if new.attributes.get("keepdims", 1) else 0)
    return new.result("Reshape", count, new.ints(*shape))


_COUNTED: Final = (TensorProto.BOOL, TensorProto.INT64)


def _origin(name: str, graph: OnnxGraph) -> str:
    """What a value has the elements of, in another shape."""
    while (maker := graph.maker_of(name)) is not None and maker.op_type in ("Reshape", "Identity"):
        name = maker.input[0]
    return name


def gather_elements(new: Replacement) -> Nodes | None:
    """GatherElements: clip indices along one axis."""
    shape = new.shape_of(new.inputs[0])
    if 0 in shape:
        return None
    places = new.graph.shape_of(new.inputs[1])
    if not shape:
        return None if places is None else _of_scalars(new, places)
    return _clipped(new, [shape[int(new.attributes.get("axis", 0))]])


def scatter_elements(new: Replacement) -> Nodes | None:
    """ScatterElements: clip indices along one axis. Without indices, it is its data."""
    shape, places = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    if 0 in shape:
        return None
    if 0 in places:
        return _same(new)
    if not shape:
        return _of_scalars(new, ())
    axis = int(new.attributes.get("axis", 0)) % len(shape)
    # TVM counts rows of the data and of the updates together, so only the first axis on each side of `axis`
    # may be shorter.
    if any(places[at] != shape[at] for at in range(1, len(shape)) if at not in (axis, axis + 1)):
        return _by_coordinates(new, axis, places)
    return _clipped(new, [shape[axis]])


def _by_coordinates(new: Replacement, axis: int, places: Sequence[int]) -> Nodes | None:
    """ScatterElements of updates [places...] as a ScatterND: each update with all its coordinates."""
    found = new.type_of(new.inputs[1])
    coordinates = [new.constant(grid[..., None], found.dtype) for grid in np.indices(places)]
    coordinates[axis] = new.op("Reshape", new.inputs[1], new.ints(*places, 1))
    indices = new.cast(new.op("Concat", *coordinates, axis=len(places)), TensorProto.INT64)
    options = {name: value for name, value in new.attributes.items() if name == "reduction"}
    return new.result("ScatterND", new.inputs[0], indices, new.inputs[2], **options)


def scatter_nd(new: Replacement) -> Nodes | None:
    """ScatterND: clip indices. TVM has no largest or smallest: these are a ScatterElements of rows."""
    shape, places = new.graph.shape_of(new.inputs[0]), new.graph.shape_of(new.inputs[1])
    is_extreme = new.attributes.get("reduction") in ("max", "min")
    if not is_extreme or not shape or not places or 0 in shape or 0 in places:
        return clip_coordinates(new)
    count, outer = places[-1], math.prod(places[:-1])
    extents, row = np.array(shape[:count]), math.prod(shape[count:])
    steps = [math.prod(extents[at + 1 :]) for at in range(count)]
    inside = new.op("Mod", new.cast(new.inputs[1], TensorProto.INT64), new.ints(*extents))
    rows = new.reduce("ReduceSum", new.op("Mul", inside, new.ints(*steps)), [-1], keep=True)
    indices = new.op("Expand", new.op("Reshape", rows, new.ints(outer, 1)), new.ints(outer, row))
    data, updates = (new.op("Reshape", new.inputs[at], new.ints(-1, row)) for at in (0, 2))
    result = new.op("ScatterElements", data, indices, updates, axis=0, **new.attributes)
    return new.result("Reshape", result, new.ints(*shape))


def _same(new: Replacement) -> Nodes:
    return new.result("Identity", new.inputs[0])


def _of_scalars(new: Replacement, shape: Sequence[int]) -> Nodes | None:
    """The same with one axis of one element: PyTorch's exporter writes scalars, though ONNX has none here."""
    rows = [new.op("Reshape", name, new.ints(-1)) for name in new.inputs]
    result = new.op(new.node.op_type, *rows, **new.attributes)
    return new.result("Reshape", result, new.ints(*shape))


def clip_coordinates(new: Replacement) -> Nodes | None:
    """GatherND and ScatterND: clip indices [..., coordinates]. A ScatterND without indices is its data."""
    shape, places = new.shape_of(new.inputs[0]), new.graph.shape_of(new.inputs[1])
    if not places or 0 in shape:
        return None
    if 0 in places[:-1] and new.node.op_type == "ScatterND":
        return _same(new)
    first = int(new.attributes.get("batch_dims", 0))
    return _clipped(new, list(shape[first : first + places[-1]]))


def _clipped(new: Replacement, extents: list[int]) -> Nodes | None:
    """The node with its indices (input 1) clipped to -extent to extent - 1 for each coordinate."""
    found = new.type_of(new.inputs[1])
    maker = new.graph.maker_of(new.inputs[1])
    if new.graph.is_constant(new.inputs[1]) or (maker is not None and _is_clip(maker)):
        return None
    highest = new.constant(np.array(extents) - 1, found.dtype)
    lowest = new.constant(-np.array(extents), found.dtype)
    # Max and Min, because Clip has the same bounds for all coordinates.
    clipped = new.op("Min", new.op("Max", new.inputs[1], lowest), highest)
    new.nodes[-1].name += _MARK
    copy = copy_node(new.node)
    copy.input[1] = clipped
    return [*new.nodes, copy]


_MARK: Final = "/in_bounds"


def _is_clip(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Min" and node.name.endswith(_MARK))
