"""Quantised operators of com.microsoft, rewritten as dequantise, operate, quantise.

ONNX Runtime's documentation defines them so (docs/ContribOperators.md in its repository). Its quantiser
writes them in the form that it calls QOperator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.opset import WITH_BLOCKS
from builder.importer.rewrites.microsoft.products import to_channels_first, to_channels_last
from builder.importer.rewrites.replacement import Replacement, Rewrite, input_name

# Codes of four bits in a byte, the lower half first.
_NIBBLES: Final = 2
_SOFTMAX_OF_ONE_AXIS: Final = 13


def binary(op_type: str) -> Rewrite:
    """Return the rewrite of QLinearAdd or QLinearMul: a, b and c, each with its scale and zero point."""

    def rewrite(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
        new = Replacement(node, graph)
        left = _dequantised(new, *_three(node, 0))
        right = _dequantised(new, *_three(node, 3))
        return _quantised(new, node, new.op(op_type, left, right), *_three(node, 6)[:2])

    return rewrite


def unary(operate: Callable[[Replacement, onnx.NodeProto, str, tuple[int, ...]], str]) -> Rewrite:
    """Return the rewrite of an operator of x, x_scale, x_zero, y_scale, y_zero.

    `operate` gets the name of x and its shape; with the attribute `channels_last`, as with channels first.
    """

    def rewrite(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
        shape = graph.shape_of(node.input[0])
        if shape is None:
            return None
        new = Replacement(node, graph)
        x = _dequantised(new, *_three(node, 0))
        if not attributes(node).get("channels_last", 0):
            return _quantised(new, node, operate(new, node, x, shape), *_three(node, 3)[:2])
        rank = len(shape)
        x = new.op("Transpose", x, perm=to_channels_first(rank))
        y = operate(new, node, x, (shape[0], shape[-1], *shape[1:-1]))
        y = new.op("Transpose", y, perm=to_channels_last(rank))
        return _quantised(new, node, y, *_three(node, 3)[:2])

    return rewrite


def leaky_relu(new: Replacement, node: onnx.NodeProto, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearLeakyRelu."""
    return new.op("LeakyRelu", x, alpha=float(attributes(node).get("alpha", 0.01)))


def sigmoid(new: Replacement, _node: onnx.NodeProto, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearSigmoid."""
    return new.op("Sigmoid", x)


def softmax(new: Replacement, node: onnx.NodeProto, x: str, shape: tuple[int, ...]) -> str:
    """QLinearSoftmax; the Softmax of an opset before 13 takes all axes from `axis` on for one."""
    given = attributes(node)
    axis = int(given.get("axis", -1))
    if int(given.get("opset", _SOFTMAX_OF_ONE_AXIS)) >= _SOFTMAX_OF_ONE_AXIS:
        return new.op("Softmax", x, axis=axis)
    flat = new.op("Flatten", x, axis=axis)
    return new.op("Reshape", new.op("Softmax", flat, axis=-1), new.ints(*shape))


def average_pool(new: Replacement, node: onnx.NodeProto, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearAveragePool."""
    y = new.op("AveragePool", x)
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    new.nodes[-1].attribute.extend(a for a in node.attribute if a.name in names)
    return y


def global_average_pool(new: Replacement, _node: onnx.NodeProto, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearGlobalAveragePool."""
    return new.op("GlobalAveragePool", x)


def reduce_mean(new: Replacement, node: onnx.NodeProto, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearReduceMean with the axes as an attribute."""
    given = attributes(node)
    return new.reduce("ReduceMean", x, [int(a) for a in given["axes"]], keep=bool(given.get("keepdims", 1)))


def conv(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """QLinearConv, which ONNX Runtime writes with channels last; its weights have channels first."""
    shape = graph.shape_of(node.input[0])
    if shape is None:
        return None
    options = attributes(node)
    turned = bool(options.pop("channels_last", 0))
    new = Replacement(node, graph)
    x, *rest = node.input
    if turned:
        x = new.op("Transpose", x, perm=to_channels_first(len(shape)))
    y = new.op("QLinearConv", x, *rest, to="" if turned else node.output[0], **options)
    if turned:
        new.op("Transpose", y, perm=to_channels_last(len(shape)), to=node.output[0])
    return new.nodes


def concat(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """QLinearConcat of y_scale, y_zero, then tensor, scale, zero for each input."""
    new = Replacement(node, graph)
    parts = [_dequantised(new, *_three(node, at)) for at in range(2, len(node.input), 3)]
    y = new.op("Concat", *parts, axis=int(attributes(node)["axis"]))
    return _quantised(new, node, y, node.input[0], input_name(node, 1))


def where(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """QLinearWhere of condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero."""
    new = Replacement(node, graph)
    yes, no = _dequantised(new, *_three(node, 1)), _dequantised(new, *_three(node, 4))
    return _quantised(new, node, new.op("Where", node.input[0], yes, no), *_three(node, 7)[:2])


def gemm(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """QGemm of a, a_scale, a_zero, b, b_scale, b_zero, and optionally c, y_scale, y_zero."""
    new = Replacement(node, graph)
    given = attributes(node)
    turned = int(given.get("transB", 0))
    a = _dequantised(new, *_three(node, 0))
    b = _dequantised(new, *_three(node, 3), axis=0 if turned else 1)
    operands = [a, b]
    alpha = float(given.get("alpha", 1.0))
    if bias := input_name(node, 6):
        # int32 with the scale of the products.
        scale = new.op("Mul", node.input[1], node.input[4])
        if alpha != 1.0:
            scale = new.op("Mul", scale, new.constant(alpha, np.float32))
        operands.append(new.op("Mul", new.cast(bias, TensorProto.FLOAT), scale))
    last = not input_name(node, 7)
    turns = {"transA": int(given.get("transA", 0)), "transB": turned}
    y = new.op("Gemm", *operands, to=node.output[0] if last else "", alpha=alpha, **turns)
    return new.nodes if last else _quantised(new, node, y, node.input[7], input_name(node, 8))


def matmul_to_float(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MatMulIntegerToFloat of a, b, a_scale, b_scale, and optionally a_zero, b_zero, bias."""
    return _product(node, graph, node.input[0], node.input[2], input_name(node, 4), 3, 5, 6)


def dynamic_matmul(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """DynamicQuantizeMatMul of a, b, b_scale, and optionally b_zero, bias: a is quantised first."""
    new = Replacement(node, graph)
    quantised, scale, zero = new.op_many("DynamicQuantizeLinear", 3, node.input[0])
    rest = _product(node, graph, quantised, scale, zero, 2, 3, 4)
    return None if rest is None else [*new.nodes, *rest]


def _product(
    node: onnx.NodeProto,
    graph: OnnxGraph,
    a: str,
    scale: str,
    zero: str,
    b_scale: int,
    b_zero: int,
    bias: int,
) -> Sequence[onnx.NodeProto] | None:
    """Return the product of bytes `a` with the second input, as float32; numbers are places of inputs."""
    if not graph.shape_of(a) and graph.shape_of(node.input[0]) is None:
        return None
    new = Replacement(node, graph)
    operands = [a, node.input[1]]
    weight_zero = input_name(node, b_zero)
    if zero or weight_zero:
        operands.append(zero or new.constant(0, np.uint8))
    if weight_zero:
        operands.append(weight_zero)
    sums = new.cast(new.op("MatMulInteger", *operands), TensorProto.FLOAT)
    last = input_name(node, bias)
    y = new.op("Mul", sums, new.op("Mul", scale, node.input[b_scale]), to="" if last else node.output[0])
    if last:
        new.op("Add", y, last, to=node.output[0])
    return new.nodes


def matmul_n_bits(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MatMulNBits of a, codes, scales, and optionally zero points, group indices (refused) and bias.

    The codes, `[N, blocks, block_size * bits / 8]`, become a matrix `[K, N]` that is dequantised in blocks,
    as ONNX has it since opset 21; with an older opset, or with zero points in float, one of float32.
    """
    given = attributes(node)
    bits, size = int(given.get("bits", 4)), int(given["block_size"])
    depth, columns = int(given["K"]), int(given["N"])
    codes, scales = graph.constant(node.input[1]), graph.constant(node.input[2])
    if codes is None or scales is None or bits not in (4, 8) or input_name(node, 4):
        return None
    blocks = -(-depth // size)
    values = codes_of(codes.reshape(columns, blocks, -1), bits)
    zeros = np.full((columns, blocks), 2 ** (bits - 1), np.uint8)
    whole = True
    if zero := input_name(node, 3):
        given_zeros = graph.constant(zero)
        if given_zeros is None:
            return None
        whole = given_zeros.dtype == np.uint8
        flat = codes_of(given_zeros.reshape(columns, -1), bits)[:, :blocks] if whole else given_zeros
        zeros = flat.reshape(columns, blocks)
    factors = scales.reshape(columns, blocks).astype(np.float32)
    new = Replacement(node, graph)
    last = input_name(node, 5)
    if whole and graph.opset >= WITH_BLOCKS:
        parts = (values.reshape(columns, -1)[:, :depth], factors, zeros)
        names = [new.constant(np.ascontiguousarray(part.T), part.dtype) for part in parts]
        matrix = new.op("DequantizeLinear", *names, axis=0, block_size=size)
    else:
        steps = values.astype(np.float32) - zeros.astype(np.float32)[:, :, None]
        weights = (steps * factors[:, :, None]).reshape(columns, -1)[:, :depth]
        matrix = new.constant(np.ascontiguousarray(weights.T), np.float32)
    y = new.op("MatMul", node.input[0], matrix, to="" if last else node.output[0])
    if last:
        new.op("Add", y, last, to=node.output[0])
    return new.nodes


def codes_of(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes of `bits` each, which are packed along the last axis, the lowest bits first."""
    if bits == 8:
        return packed
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], packed.shape[-1] * _NIBBLES)


def same_in_onnx(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto]:
    """QuantizeLinear and DequantizeLinear, which ONNX now defines for the same types."""
    del graph
    new = helper.make_node(node.op_type, list(node.input), list(node.output), name=node.name)
    new.attribute.extend(node.attribute)
    return [new]


def _three(node: onnx.NodeProto, first: int) -> tuple[str, str, str]:
    """Return the names of a tensor, its scale and its zero point, from the input `first` on."""
    return input_name(node, first), input_name(node, first + 1), input_name(node, first + 2)


def _dequantised(new: Replacement, x: str, scale: str, zero: str, axis: int = 1) -> str:
    return new.op("DequantizeLinear", x, scale, *([zero] if zero else []), axis=axis)


def _quantised(
    new: Replacement, node: onnx.NodeProto, y: str, scale: str, zero: str
) -> Sequence[onnx.NodeProto]:
    new.op("QuantizeLinear", y, scale, *([zero] if zero else []), to=node.output[0])
    return new.nodes
