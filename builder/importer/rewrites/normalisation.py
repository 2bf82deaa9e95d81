"""Normalisations that the front end lacks, or supports only along the usual axes."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from builder.errors import ModelError
from builder.importer.onnx_graph import copy_node
from builder.importer.rewrites.replacement import Nodes, Replacement


def lp_normalization(new: Replacement) -> Nodes | None:
    """LpNormalization: x divided by its norm along an axis, or 0 if the norm is 0."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    if found.shape is None:
        return None
    axis = int(options.get("axis", -1))
    norm = new.reduce(
        "ReduceL1" if options.get("p", 2) == 1 else "ReduceL2", new.inputs[0], [axis], keep=True
    )
    zero = new.constant(0, found.dtype)
    safe = new.op("Where", new.op("Equal", norm, zero), new.constant(1, found.dtype), norm)
    return new.result("Div", new.inputs[0], safe)


def mean_variance_normalization(new: Replacement) -> Nodes | None:
    """MeanVarianceNormalization-13: ONNX defines it, but ONNX's own inference refuses the definition."""
    found = new.type_of(new.inputs[0])
    axes = list(new.attributes.get("axes", [0, 2, 3]))
    rank = None if found.shape is None else len(found.shape)
    if rank is not None and not all(-rank <= axis < rank for axis in axes):
        # ONNX's default is for images, whatever the rank.
        raise ModelError(
            f"MeanVarianceNormalization ({new.node.name}): expected axes of {rank} dimensions, got {axes}",
            hint="give the node the attribute `axes`: without it, ONNX takes 0, 2 and 3",
        )
    x = new.inputs[0]
    centred = new.op("Sub", x, new.reduce("ReduceMean", x, axes, keep=True))
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), axes, keep=True)
    deviation = new.op("Add", new.op("Sqrt", variance), new.constant(1e-9, found.dtype))
    return new.result("Div", centred, deviation)


def group_normalization(new: Replacement) -> Nodes | None:
    """GroupNormalization, with the squares of differences: ONNX's definition takes those of x itself."""
    options, found, shape = new.attributes, new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    gains = new.graph.shape_of(new.inputs[1])
    if len(shape) < 2 or 0 in shape or gains != shape[1:2]:
        return None
    rank, groups = len(shape), int(options["num_groups"])
    stash = int(options.get("stash_type", TensorProto.FLOAT))
    x = new.inputs[0] if stash == found.elem_type else new.cast(new.inputs[0], stash)
    grouped = new.op("Reshape", x, new.ints(shape[0], groups, -1))
    centred = new.op("Sub", grouped, new.reduce("ReduceMean", grouped, [2], keep=True))
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), [2], keep=True)
    epsilon = new.cast(new.constant(options.get("epsilon", 1e-5), np.float32), stash)
    normal = new.op("Div", centred, new.op("Sqrt", new.op("Add", variance, epsilon)))
    normal = new.op("Reshape", normal, new.ints(*shape))
    if stash != found.elem_type:
        normal = new.cast(normal, found.elem_type)
    column = new.ints(-1, *[1] * (rank - 2))
    gain, shift = (new.op("Reshape", name, column) for name in new.inputs[1:3])
    return new.result("Add", new.op("Mul", normal, gain), shift)


def layer_normalization(new: Replacement) -> Nodes | None:
    """LayerNormalization with a scale or bias of another shape than what is normalised: applied behind it."""
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    normalised = shape[int(new.attributes.get("axis", -1)) :]
    factors = [name for name in new.inputs[1:3] if name]
    if not shape or all(new.shape_of(name) == normalised for name in factors):
        return None
    plain = copy_node(new.node)
    plain.input[:] = [new.inputs[0], new.constant(np.ones(normalised), found.dtype)]
    plain.output[0] = new.graph.fresh(f"{new.node.name}/plain")
    new.nodes.append(plain)
    if len(factors) == 1:
        new.op("Mul", plain.output[0], factors[0], to=new.outputs[0])
    else:
        new.op("Add", new.op("Mul", plain.output[0], factors[0]), factors[1], to=new.outputs[0])
    return new.nodes


def rms_normalization(new: Replacement) -> Nodes | None:
    """RMSNormalization over more than the last axis."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    if found.shape is None:
        return None
    rank = len(found.shape)
    first = int(options.get("axis", -1)) % rank
    if first == rank - 1:
        return None
    stash = int(options.get("stash_type", TensorProto.FLOAT))
    x = new.inputs[0] if stash == found.elem_type else new.cast(new.inputs[0], stash)
    mean = new.reduce("ReduceMean", new.op("Mul", x, x), list(range(first, rank)), keep=True)
    epsilon = new.cast(new.constant(options.get("epsilon", 1e-5), np.float32), stash)
    x = new.op("Div", x, new.op("Sqrt", new.op("Add", mean, epsilon)))
    if stash != found.elem_type:
        x = new.cast(x, found.elem_type)
    return new.result("Mul", x, new.inputs[1])


def batch_normalization(new: Replacement) -> Nodes | None:
    """BatchNormalization of a vector, and in training mode, which the front end would take for inference."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    if found.shape is not None and len(found.shape) == 1:
        return _of_a_vector(new)
    if not options.get("training_mode", 0) or found.shape is None:
        return None
    x, scale, bias, old_mean, old_variance = new.inputs
    rank = len(found.shape)
    axes = [axis for axis in range(rank) if axis != 1]
    mean = new.reduce("ReduceMean", x, axes, keep=True)
    centred = new.op("Sub", x, mean)
    variance = new.reduce("ReduceMean", new.op("Mul", centred, centred), axes, keep=True)
    epsilon = new.constant(options.get("epsilon", 1e-5), found.dtype)
    normal = new.op("Div", centred, new.op("Sqrt", new.op("Add", variance, epsilon)))
    column = new.ints(-1, *[1] * (rank - 2))
    scaled = new.op("Mul", normal, new.op("Reshape", scale, column))
    new.op("Add", scaled, new.op("Reshape", bias, column), to=new.outputs[0])
    momentum = float(options.get("momentum", 0.9))
    for index, old, current in ((1, old_mean, mean), (2, old_variance, variance)):
        if name := new.output(index):
            kept = new.op("Mul", old, new.constant(momentum, found.dtype))
            flat = new.op("Reshape", current, new.ints(-1))
            added = new.op("Mul", flat, new.constant(1 - momentum, found.dtype))
            new.op("Add", kept, added, to=name)
    return new.nodes


def _of_a_vector(new: Replacement) -> Nodes:
    """BatchNormalization of a vector: samples of one channel."""
    matrix = copy_node(new.node)
    matrix.input[0] = new.op("Unsqueeze", new.inputs[0], new.ints(1))
    matrix.output[0] = new.graph.fresh(f"{new.node.name}/column")
    new.nodes.append(matrix)
    new.op("Squeeze", matrix.output[0], new.ints(1), to=new.outputs[0])
    return new.nodes
