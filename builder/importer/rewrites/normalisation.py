"""Normalisations that the front end lacks, or supports only along the usual axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import TensorProto

from builder.errors import ModelError
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement, output_name


def lp_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """LpNormalization: x divided by its norm along an axis, or 0 if the norm is 0."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    if found is None or found.shape is None:
        return None
    axis = int(options.get("axis", -1))
    new = Replacement(node, graph)
    norm = new.reduce(
        "ReduceL1" if options.get("p", 2) == 1 else "ReduceL2", node.input[0], [axis], keep=True
    )
    zero = new.constant(0, found.dtype)
    safe = new.op("Where", new.op("Equal", norm, zero), new.constant(1, found.dtype), norm)
    new.op("Div", node.input[0], safe, to=node.output[0])
    return new.nodes


def mean_variance_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MeanVarianceNormalization-13: ONNX defines it, but ONNX's own inference refuses the definition."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    axes = list(attributes(node).get("axes", [0, 2, 3]))
    rank = None if found.shape is None else len(found.shape)
    if rank is not None and not all(-rank <= axis < rank for axis in axes):
        # ONNX's default is for images, whatever the rank.
        raise ModelError(
            f"MeanVarianceNormalization ({node.name}): expected axes of {rank} dimensions, got {axes}",
            hint="give the node the attribute `axes`: without it, ONNX takes 0, 2 and 3",
        )
    new = Replacement(node, graph)
    x = node.input[0]
    centred = new.op("Sub", x, new.reduce("ReduceMean", x, axes, keep=True))
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), axes, keep=True)
    deviation = new.op("Add", new.op("Sqrt", variance), new.constant(1e-9, found.dtype))
    new.op("Div", centred, deviation, to=node.output[0])
    return new.nodes


def group_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """GroupNormalization, with the squares of differences: ONNX's definition takes those of x itself."""
    options, found, shape = attributes(node), graph.type_of(node.input[0]), graph.shape_of(node.input[0])
    gains = graph.shape_of(node.input[1])
    if found is None or shape is None or len(shape) < 2 or 0 in shape or gains != shape[1:2]:
        return None
    rank, groups = len(shape), int(options["num_groups"])
    stash = int(options.get("stash_type", TensorProto.FLOAT))
    new = Replacement(node, graph)
    x = node.input[0] if stash == found.elem_type else new.cast(node.input[0], stash)
    grouped = new.op("Reshape", x, new.ints(shape[0], groups, -1))
    centred = new.op("Sub", grouped, new.reduce("ReduceMean", grouped, [2], keep=True))
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), [2], keep=True)
    epsilon = new.cast(new.constant(options.get("epsilon", 1e-5), np.float32), stash)
    normal = new.op("Div", centred, new.op("Sqrt", new.op("Add", variance, epsilon)))
    normal = new.op("Reshape", normal, new.ints(*shape))
    if stash != found.elem_type:
        normal = new.cast(normal, found.elem_type)
    column = new.ints(-1, *[1] * (rank - 2))
    gain, shift = (new.op("Reshape", name, column) for name in node.input[1:3])
    new.op("Add", new.op("Mul", normal, gain), shift, to=node.output[0])
    return new.nodes


def rms_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """RMSNormalization over more than the last axis."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    if found is None or found.shape is None:
        return None
    rank = len(found.shape)
    first = int(options.get("axis", -1)) % rank
    if first == rank - 1:
        return None
    new = Replacement(node, graph)
    stash = int(options.get("stash_type", TensorProto.FLOAT))
    x = node.input[0] if stash == found.elem_type else new.cast(node.input[0], stash)
    mean = new.reduce("ReduceMean", new.op("Mul", x, x), list(range(first, rank)), keep=True)
    epsilon = new.cast(new.constant(options.get("epsilon", 1e-5), np.float32), stash)
    x = new.op("Div", x, new.op("Sqrt", new.op("Add", mean, epsilon)))
    if stash != found.elem_type:
        x = new.cast(x, found.elem_type)
    new.op("Mul", x, node.input[1], to=node.output[0])
    return new.nodes


def batch_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """BatchNormalization in training mode, which the front end would treat as inference mode."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    if not options.get("training_mode", 0) or found is None or found.shape is None:
        return None
    x, scale, bias, old_mean, old_variance = node.input
    rank = len(found.shape)
    axes = [axis for axis in range(rank) if axis != 1]
    new = Replacement(node, graph)
    mean = new.reduce("ReduceMean", x, axes, keep=True)
    centred = new.op("Sub", x, mean)
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), axes, keep=True)
    epsilon = new.constant(options.get("epsilon", 1e-5), found.dtype)
    normal = new.op("Div", centred, new.op("Sqrt", new.op("Add", variance, epsilon)))
    column = new.ints(-1, *[1] * (rank - 2)) if rank > 1 else new.ints(-1)
    scaled = new.op("Mul", normal, new.op("Reshape", scale, column))
    new.op("Add", scaled, new.op("Reshape", bias, column), to=node.output[0])
    momentum = float(options.get("momentum", 0.9))
    for index, old, current in ((1, old_mean, mean), (2, old_variance, variance)):
        if name := output_name(node, index):
            kept = new.op("Mul", old, new.constant(momentum, found.dtype))
            flat = new.op("Reshape", current, new.ints(-1))
            added = new.op("Mul", flat, new.constant(1 - momentum, found.dtype))
            new.op("Add", kept, added, to=name)
    return new.nodes
