"""Fold constants that scale or shift the channels of a convolution or matrix product into its weights.

Most batch norms are folded when a model is imported. This folds the rest, so that quantised weights already
contain every factor and no shift stands between a sum and its levels.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from builder.importer.onnx_graph import (
    OnnxGraph,
    attributes,
    copy_node,
    reads,
    remove_dead_nodes,
    set_attributes,
)
from builder.importer.shapes import infer_shapes

# Operator -> axis of the output's channels.
_CHANNEL_AXES: Final = {"Conv": 1, "Gemm": -1, "MatMul": -1}
_FACTORS: Final = frozenset({"Mul", "Div"})
_SHIFTS: Final = frozenset({"Add", "Sub"})

Array = NDArray[Any]


def folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of a normalised model with static shapes, with constants folded into weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if fold_into_weights(copy):
        infer_shapes(copy)
    return copy


def fold_into_weights(model: onnx.ModelProto) -> int:
    """Fold in place, and return how many nodes were folded.

    `model`: a normalised model with static shapes.
    """
    count = 0
    while _fold_once(model):
        count += 1
    remove_dead_nodes(model.graph)
    return count


def _fold_once(model: onnx.ModelProto) -> bool:
    graph = OnnxGraph(model)
    for index, node in enumerate(model.graph.node):
        axis = _CHANNEL_AXES.get(node.op_type)
        if axis is None or node.domain or not _has_weights(node, graph):
            continue
        if node.op_type == "Gemm" and _fold_gemm_factors(node, graph):
            return True
        reader = _only_reader(node.output[0], model)
        if reader is None:
            continue
        change = _affine(reader, node, graph, axis)
        if change is None:
            continue
        factor, shift = change
        if shift is not None and node.op_type == "MatMul":
            continue  # it has no input for a shift; the Add stays and is quantised with it
        folded = _scaled(node, graph, factor, shift)
        folded.output[0] = reader.output[0]
        model.graph.node[index].CopyFrom(folded)
        model.graph.node.remove(reader)
        return True
    return False


def _has_weights(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    names = [name for name in node.input[1:] if name]
    kinds = [graph.constant(name) for name in names]
    return bool(kinds) and all(kind is not None and kind.dtype == np.float32 for kind in kinds)


def _only_reader(name: str, model: onnx.ModelProto) -> onnx.NodeProto | None:
    readers = [node for node in model.graph.node if name in reads(node)]
    if len(readers) != 1 or name in {output.name for output in model.graph.output}:
        return None
    reader: onnx.NodeProto = readers[0]
    return None if reader.domain else reader


def _affine(
    reader: onnx.NodeProto, node: onnx.NodeProto, graph: OnnxGraph, axis: int
) -> tuple[Array, Array | None] | None:
    """Factor and shift of each channel that `reader` applies to the output of `node`, in float64."""
    shape = graph.shape_of(node.output[0])
    if shape is None or not shape:
        return None
    channels = shape[axis]
    if reader.op_type == "BatchNormalization" and axis == 1 and len(reader.output) == 1:
        tables = [graph.constant(name) for name in reader.input[1:5]]
        if any(table is None for table in tables):
            return None
        scale, bias, mean, variance = (np.asarray(table, np.float64) for table in tables)
        factor = scale / np.sqrt(variance + attributes(reader).get("epsilon", 1e-5))
        return factor, bias - mean * factor
    if reader.op_type not in _FACTORS | _SHIFTS or len(reader.input) != 2:
        return None
    left = reader.input[0] == node.output[0]
    constant = graph.constant(reader.input[1 if left else 0])
    if constant is None or (not left and reader.op_type in ("Div", "Sub")):
        return None
    values = _per_channel(constant, shape, axis, channels)
    if values is None:
        return None
    match reader.op_type:
        case "Mul":
            return values, None
        case "Div":
            return (1 / values, None) if values.all() else None
        case "Add":
            return np.ones(channels), values
        case _:
            return np.ones(channels), -values


def _per_channel(constant: Array, shape: tuple[int, ...], axis: int, channels: int) -> Array | None:
    """Values of a constant that is one number, or one for each channel; shape [channels]."""
    if constant.ndim > len(shape):
        return None
    aligned = (1,) * (len(shape) - constant.ndim) + constant.shape
    only = [1] * len(shape)
    only[axis] = aligned[axis]
    if list(aligned) != only or aligned[axis] not in (1, channels):
        return None
    return np.broadcast_to(constant.reshape(-1).astype(np.float64), (channels,))


def _scaled(node: onnx.NodeProto, graph: OnnxGraph, factor: Array, shift: Array | None) -> onnx.NodeProto:
    """A copy of a node with scaled weights and a scaled and shifted bias."""
    copy = copy_node(node)
    weight = graph.constant(node.input[1])
    assert weight is not None
    rows = node.op_type == "Conv" or (node.op_type == "Gemm" and attributes(node).get("transB", 0))
    column = factor.reshape((-1,) + (1,) * (weight.ndim - 1)) if rows else factor
    copy.input[1] = graph.add_constant((weight * column).astype(np.float32), f"{node.name}_weight")
    bias = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    if bias is None and shift is None:
        return copy
    total = (0.0 if bias is None else np.asarray(bias, np.float64) * factor) + (
        0.0 if shift is None else shift
    )
    name = graph.add_constant(np.asarray(total).astype(np.float32), f"{node.name}_bias")
    del copy.input[2:]
    copy.input.append(name)
    return copy


def _fold_gemm_factors(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Fold `alpha` into the matrix and `beta` into the bias."""
    options = attributes(node)
    alpha, beta = options.get("alpha", 1.0), options.get("beta", 1.0)
    if alpha == 1.0 and beta == 1.0:
        return False
    for index, factor in ((1, alpha), (2, beta)):
        if factor == 1.0 or len(node.input) <= index or not node.input[index]:
            continue
        values = graph.constant(node.input[index])
        assert values is not None
        scaled = (values.astype(np.float64) * factor).astype(np.float32)
        tensor = numpy_helper.from_array(scaled, graph.fresh(f"{node.name}_scaled"))
        graph.set_initializer(tensor)
        node.input[index] = tensor.name
    set_attributes(node, [], {"alpha": 1.0, "beta": 1.0})
    return True
