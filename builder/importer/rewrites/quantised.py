"""Operators on quantised tensors, rewritten as dequantise, operate, quantise.

That is their definition (ONNX operator specification, QLinearConv-10 and similar operators). The sums are
float32 instead of int32: a value between two steps of the output's scale may be rounded to the other step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites import convolution
from builder.importer.rewrites.replacement import Replacement, input_name

_Array = npt.NDArray[Any]


def qlinear_conv(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """QLinearConv of x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias."""
    new = Replacement(node, graph)
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = node.input[:8]
    data = new.op("DequantizeLinear", x, x_scale, x_zero)
    weight = new.op("DequantizeLinear", w, w_scale, w_zero, axis=0)
    inputs = [data, weight]
    if bias := input_name(node, 8):
        scale = new.op("Mul", x_scale, w_scale)
        inputs.append(new.op("Mul", new.cast(bias, TensorProto.FLOAT), scale))
    return [*new.nodes, *_conv(node, inputs, graph, [y_scale, y_zero])]


def _conv(
    node: onnx.NodeProto, inputs: list[str], graph: OnnxGraph, quantise: list[str]
) -> list[onnx.NodeProto]:
    """A Conv with the node's attributes, followed by QuantizeLinear."""
    conv = helper.make_node("Conv", inputs, [graph.fresh(f"{node.name}/Conv")], name=f"{node.name}/Conv")
    conv.attribute.extend(node.attribute)
    last = helper.make_node(
        "QuantizeLinear", [conv.output[0], *quantise], list(node.output), name=f"{node.name}/QuantizeLinear"
    )
    return [conv, last]


def qlinear_matmul(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """QLinearMatMul of a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero."""
    ranks = [len(shape) if (shape := graph.shape_of(node.input[i])) is not None else None for i in (0, 3)]
    if None in ranks:
        return None
    new = Replacement(node, graph)
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    # A vector of scales applies to the rows of a, or to the columns of b.
    left = new.op("DequantizeLinear", a, a_scale, a_zero, axis=max((ranks[0] or 0) - 2, 0))
    right = new.op("DequantizeLinear", b, b_scale, b_zero, axis=max((ranks[1] or 0) - 1, 0))
    new.op("QuantizeLinear", new.op("MatMul", left, right), y_scale, y_zero, to=node.output[0])
    return new.nodes


def conv_integer(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ConvInteger of x, w, x_zero, w_zero: as one of bytes, else in float32.

    In float32, sums are exact up to 2**24 and rounded above.
    """
    padded = convolution.conv(node, graph)
    if padded is not None:
        return padded
    weights = _plain_weights(node, graph)
    if weights is not None:
        if weights[0].dtype == np.uint8:
            return None
        return _with_uint8_weights(node, graph, *weights)
    new = Replacement(node, graph)
    data = new.cast(node.input[0], TensorProto.FLOAT)
    weight = new.cast(node.input[1], TensorProto.FLOAT)
    if zero := input_name(node, 2):
        data = new.op("Sub", data, new.cast(zero, TensorProto.FLOAT))
    if zero := input_name(node, 3):
        point = new.cast(zero, TensorProto.FLOAT)
        rank = len(graph.shape_of(node.input[1]) or ())
        if graph.shape_of(zero):
            point = new.op("Reshape", point, new.ints(-1, *[1] * (rank - 1)))
        weight = new.op("Sub", weight, point)
    conv = helper.make_node(
        "Conv", [data, weight], [graph.fresh(f"{node.name}/Conv")], name=f"{node.name}/Conv"
    )
    conv.attribute.extend(node.attribute)
    new.nodes.append(conv)
    new.cast(new.op("Round", conv.output[0]), TensorProto.INT32, to=node.output[0])
    return new.nodes


def _plain_weights(node: onnx.NodeProto, graph: OnnxGraph) -> tuple[_Array, _Array] | None:
    """Weights and zero point of a ConvInteger that the importer takes as one of bytes, None for others."""
    given = attributes(node)
    if int(given.get("group", 1)) != 1 or given.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    weights, shape = graph.constant(node.input[1]), graph.shape_of(node.input[0])
    if weights is None or shape is None or len(shape) not in (3, 4) or not weights.size or 0 in shape:
        return None
    if _dtype_of(node.input[0], graph) != np.uint8:  # ONNX Runtime, the reference, has no other
        return None
    zero: _Array | None = np.zeros((), weights.dtype)
    if name := input_name(node, 3):
        zero = graph.constant(name)
    points = input_name(node, 2)
    is_scalar = not points or np.prod(graph.shape_of(points) or (), dtype=np.int64) == 1
    return (weights, zero) if zero is not None and zero.size == 1 and is_scalar else None


def _with_uint8_weights(
    node: onnx.NodeProto, graph: OnnxGraph, weights: _Array, zero: _Array
) -> list[onnx.NodeProto]:
    """A ConvInteger of int8 weights with uint8 weights, 128 larger: ONNX Runtime has no other."""
    new = Replacement(node, graph)
    moved = [(array.astype(np.int16) + 128).astype(np.uint8) for array in (weights, zero)]
    first = input_name(node, 2) or new.constant(0, np.uint8)
    new.op(
        "ConvInteger",
        node.input[0],
        new.constant(moved[0], np.uint8),
        first,
        new.constant(moved[1], np.uint8),
        to=node.output[0],
    )
    new.nodes[-1].attribute.extend(node.attribute)
    return new.nodes


def matmul_integer(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MatMulInteger with constant int8 weights: the same with uint8 weights, 128 larger.

    ONNX Runtime, which is the reference, computes products of uint8 and int8 with sums of pairs that
    saturate on processors with AVX2 and without VNNI (VPMADDUBSW). Products of uint8 and uint8 are exact.
    """
    weights = graph.constant(node.input[1])
    if weights is None or weights.dtype != np.int8:
        return None
    zero = np.zeros((), np.int8)
    if name := input_name(node, 3):
        given = graph.constant(name)
        if given is None or given.dtype != np.int8:
            return None
        zero = given
    new = Replacement(node, graph)
    moved = [(array.astype(np.int16) + 128).astype(np.uint8) for array in (weights, zero)]
    first = input_name(node, 2) or new.constant(0, _dtype_of(node.input[0], graph))
    new.op(
        "MatMulInteger",
        node.input[0],
        new.constant(moved[0], np.uint8),
        first,
        new.constant(moved[1], np.uint8),
        to=node.output[0],
    )
    return new.nodes


def _dtype_of(name: str, graph: OnnxGraph) -> np.dtype[Any]:
    kind = graph.type_of(name)
    if kind is None:
        raise ValueError(f"expected a tensor of a known type, got {name}")
    return kind.dtype


def dequantise_blocks(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """DequantizeLinear with a scale for each block along an axis; constants stay so, in their few bits."""
    codes = graph.constant(node.input[0])
    rest = [name for name in node.input[1:] if name]
    if codes is not None and codes.dtype in (np.int8, np.uint8) and all(map(graph.is_constant, rest)):
        return None
    return _with_scales_of_blocks(node, graph)


def quantise_blocks(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """QuantizeLinear with a scale for each block along an axis."""
    return _with_scales_of_blocks(node, graph)


def _with_scales_of_blocks(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """The node's arithmetic, with each scale and zero point repeated for the elements of its block."""
    options = attributes(node)
    block = int(options.get("block_size", 0))
    shape, scales = graph.shape_of(node.input[0]), graph.shape_of(node.input[1])
    found, kind = graph.type_of(node.input[0]), graph.type_of(node.input[1])
    if block < 1 or shape is None or scales is None or len(scales) != len(shape) or not shape:
        return None
    axis = int(options.get("axis", 1)) % len(shape)
    if found is None or kind is None or -(-shape[axis] // block) != scales[axis]:
        return None
    quantises = node.op_type == "QuantizeLinear"
    whole = graph.type_of(node.output[0] if quantises else node.input[0])
    if whole is None or whole.dtype.kind not in "iu" or whole.dtype.itemsize > 2:
        return None
    if kind.elem_type != TensorProto.FLOAT:
        return None
    new = Replacement(node, graph)

    def repeated(name: str) -> str:
        places = np.arange(shape[axis]) // block
        return new.op("Gather", name, new.constant(places, np.int64), axis=axis)

    scale = repeated(node.input[1])
    zero = input_name(node, 2)
    offset = repeated(new.cast(zero, TensorProto.FLOAT)) if zero else ""
    if not quantises:
        x = new.cast(node.input[0], TensorProto.FLOAT)
        new.op("Mul", new.op("Sub", x, offset) if offset else x, scale, to=node.output[0])
        return new.nodes
    x = new.op("Round", new.op("Div", node.input[0], scale))
    limits = np.iinfo(whole.dtype)
    x = new.op("Add", x, offset) if offset else x
    x = new.op("Clip", x, *(new.constant(float(limit), np.float32) for limit in (limits.min, limits.max)))
    new.cast(x, whole.elem_type, to=node.output[0])
    return new.nodes


def dynamic_quantize_linear(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """DynamicQuantizeLinear as ONNX defines it, and with a scale of 1 for zeros, as in ONNX Runtime.

    ONNX's definition divides 0 by 0 there.
    """
    new = Replacement(node, graph)
    x, (y, scale, zero) = node.input[0], node.output
    nothing, most = new.constant(0, np.float32), new.constant(255, np.float32)
    low = new.op("Min", new.op("ReduceMin", x, keepdims=0), nothing)
    high = new.op("Max", new.op("ReduceMax", x, keepdims=0), nothing)
    extent = new.op("Sub", high, low)
    ratio = new.op("Div", extent, most)
    step = new.op("Where", new.op("Equal", extent, nothing), new.constant(1, np.float32), ratio)
    new.op("Identity", step, to=scale)
    place = new.op("Round", new.op("Clip", new.op("Div", new.op("Sub", nothing, low), step), nothing, most))
    new.cast(place, TensorProto.UINT8, to=zero)
    new.op("QuantizeLinear", x, step, zero, to=y)
    return new.nodes
