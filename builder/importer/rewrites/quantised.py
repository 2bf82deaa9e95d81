"""Operators on quantised tensors, rewritten as dequantise, operate, quantise.

That is their definition (ONNX operator specification, QLinearConv-10 and similar operators). The sums are
float32 instead of int32: a value between two steps of the output's scale may be rounded to the other step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites import convolution
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name

_Array = npt.NDArray[Any]


def qlinear_conv(new: Replacement) -> Nodes | None:
    """QLinearConv of x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero = new.inputs[:8]
    data = new.op("DequantizeLinear", x, x_scale, x_zero)
    weight = new.op("DequantizeLinear", w, w_scale, w_zero, axis=0)
    inputs = [data, weight]
    if bias := new.input(8):
        scale = new.op("Mul", x_scale, w_scale)
        inputs.append(new.op("Mul", new.cast(bias, TensorProto.FLOAT), scale))
    y = new.op("Conv", *inputs)
    new.nodes[-1].attribute.extend(new.node.attribute)
    return new.result("QuantizeLinear", y, y_scale, y_zero)


def qlinear_matmul(new: Replacement) -> Nodes | None:
    """QLinearMatMul of a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero."""
    ranks = [len(shape) if (shape := new.graph.shape_of(new.inputs[i])) is not None else None for i in (0, 3)]
    if None in ranks:
        return None
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = new.inputs
    # A vector of scales applies to the rows of a, or to the columns of b.
    left = new.op("DequantizeLinear", a, a_scale, a_zero, axis=max((ranks[0] or 0) - 2, 0))
    right = new.op("DequantizeLinear", b, b_scale, b_zero, axis=max((ranks[1] or 0) - 1, 0))
    return new.result("QuantizeLinear", new.op("MatMul", left, right), y_scale, y_zero)


def conv_integer(new: Replacement) -> Nodes | None:
    """ConvInteger of x, w, x_zero, w_zero: as one of bytes, else in float32.

    In float32, sums are exact up to 2**24 and rounded above.
    """
    padded = convolution.conv(new)
    if padded is not None:
        return padded
    weights = _plain_weights(new.node, new.graph)
    if weights is not None:
        if weights[0].dtype == np.uint8:
            return None
        return _with_uint8_weights(new, *weights)
    data = new.cast(new.inputs[0], TensorProto.FLOAT)
    weight = new.cast(new.inputs[1], TensorProto.FLOAT)
    if zero := new.input(2):
        data = new.op("Sub", data, new.cast(zero, TensorProto.FLOAT))
    if zero := new.input(3):
        point = new.cast(zero, TensorProto.FLOAT)
        rank = len(new.graph.shape_of(new.inputs[1]) or ())
        if new.graph.shape_of(zero):
            point = new.op("Reshape", point, new.ints(-1, *[1] * (rank - 1)))
        weight = new.op("Sub", weight, point)
    sums = new.op("Conv", data, weight)
    new.nodes[-1].attribute.extend(new.node.attribute)
    return new.cast_result(new.op("Round", sums), TensorProto.INT32)


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


def _with_uint8_weights(new: Replacement, weights: _Array, zero: _Array) -> Nodes:
    """A ConvInteger of int8 weights with uint8 weights, 128 larger: ONNX Runtime has no other."""
    moved = [(array.astype(np.int16) + 128).astype(np.uint8) for array in (weights, zero)]
    first = new.input(2) or new.constant(0, np.uint8)
    new.op(
        "ConvInteger",
        new.inputs[0],
        new.constant(moved[0], np.uint8),
        first,
        new.constant(moved[1], np.uint8),
        to=new.outputs[0],
    )
    new.nodes[-1].attribute.extend(new.node.attribute)
    return new.nodes


def matmul_integer(new: Replacement) -> Nodes | None:
    """MatMulInteger with constant int8 weights: the same with uint8 weights, 128 larger.

    ONNX Runtime, which is the reference, computes products of uint8 and int8 with sums of pairs that
    saturate on processors with AVX2 and without VNNI (VPMADDUBSW). Products of uint8 and uint8 are exact.
    Vectors become matrices.
    """
    is_row, is_column = (len(new.graph.shape_of(name) or ()) == 1 for name in new.inputs[:2])
    if is_row or is_column:
        inputs = list(new.inputs)
        inputs[0] = new.op("Unsqueeze", inputs[0], new.ints(0)) if is_row else inputs[0]
        inputs[1] = new.op("Unsqueeze", inputs[1], new.ints(1)) if is_column else inputs[1]
        product = new.op("MatMulInteger", *inputs)
        new.op("Squeeze", product, new.ints(*[-2] * is_row, *[-1] * is_column), to=new.outputs[0])
        return new.nodes
    weights = new.graph.constant(new.inputs[1])
    if weights is None or weights.dtype != np.int8:
        return None
    zero = np.zeros((), np.int8)
    if name := new.input(3):
        given = new.graph.constant(name)
        if given is None or given.dtype != np.int8:
            return None
        zero = given
    moved = [(array.astype(np.int16) + 128).astype(np.uint8) for array in (weights, zero)]
    first = new.input(2) or new.constant(0, _dtype_of(new.inputs[0], new.graph))
    return new.result(
        "MatMulInteger",
        new.inputs[0],
        new.constant(moved[0], np.uint8),
        first,
        new.constant(moved[1], np.uint8),
    )


def _dtype_of(name: str, graph: OnnxGraph) -> np.dtype[Any]:
    kind = graph.type_of(name)
    if kind is None:
        raise ValueError(f"expected a tensor of a known type, got {name}")
    return kind.dtype


def dequantise_blocks(new: Replacement) -> Nodes | None:
    """DequantizeLinear with a scale for each block along an axis; constants stay so, in their few bits."""
    codes = new.graph.constant(new.inputs[0])
    rest = [name for name in new.inputs[1:] if name]
    if codes is not None and codes.dtype in (np.int8, np.uint8) and all(map(new.graph.is_constant, rest)):
        return None
    return _with_scales_of_blocks(new)


def quantise_blocks(new: Replacement) -> Nodes | None:
    """QuantizeLinear with a scale for each block along an axis."""
    return _with_scales_of_blocks(new)


def _with_scales_of_blocks(new: Replacement) -> Nodes | None:
    """The node's arithmetic, with each scale and zero point repeated for the elements of its block."""
    options = new.attributes
    block = int(options.get("block_size", 0))
    shape, scales = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    kind = new.type_of(new.inputs[1])
    if block < 1 or len(scales) != len(shape) or not shape:
        return None
    axis = int(options.get("axis", 1)) % len(shape)
    if -(-shape[axis] // block) != scales[axis]:
        return None
    quantises = new.node.op_type == "QuantizeLinear"
    whole = new.type_of(new.outputs[0] if quantises else new.inputs[0])
    if whole.dtype.kind not in "iu" or whole.dtype.itemsize > 2:
        return None
    if kind.elem_type != TensorProto.FLOAT:
        return None

    def repeated(name: str) -> str:
        places = np.arange(shape[axis]) // block
        return new.op("Gather", name, new.constant(places, np.int64), axis=axis)

    scale = repeated(new.inputs[1])
    zero = new.input(2)
    offset = repeated(new.cast(zero, TensorProto.FLOAT)) if zero else ""
    if not quantises:
        x = new.cast(new.inputs[0], TensorProto.FLOAT)
        return new.result("Mul", new.op("Sub", x, offset) if offset else x, scale)
    x = new.op("Round", new.op("Div", new.inputs[0], scale))
    limits = np.iinfo(whole.dtype)
    x = new.op("Add", x, offset) if offset else x
    x = new.op("Clip", x, *(new.constant(float(limit), np.float32) for limit in (limits.min, limits.max)))
    return new.cast_result(x, whole.elem_type)


def dynamic_quantize_linear(new: Replacement) -> Nodes:
    """DynamicQuantizeLinear as ONNX defines it, and with a scale of 1 for zeros, as in ONNX Runtime.

    ONNX's definition divides 0 by 0 there.
    """
    x, (y, scale, zero) = new.inputs[0], new.outputs
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
