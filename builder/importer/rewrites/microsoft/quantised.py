"""Quantised operators of com.microsoft, rewritten as dequantise, operate, quantise.

ONNX Runtime's documentation defines them so (docs/ContribOperators.md in its repository). Its quantiser
writes them in the form that it calls QOperator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from onnx import TensorProto, helper

from builder.importer.opset import WITH_BLOCKS
from builder.importer.rewrites.microsoft.products import to_channels_first, to_channels_last
from builder.importer.rewrites.replacement import Nodes, Replacement, Rewrite

# Codes of four bits in a byte, the lower half first.
_NIBBLES: Final = 2
_SOFTMAX_OF_ONE_AXIS: Final = 13


def binary(op_type: str) -> Rewrite:
    """Return the rewrite of QLinearAdd or QLinearMul: a, b and c, each with its scale and zero point."""

    def rewrite(new: Replacement) -> Nodes:
        left = _dequantised(new, *_three(new, 0))
        right = _dequantised(new, *_three(new, 3))
        return _quantised(new, new.op(op_type, left, right), *_three(new, 6)[:2])

    return rewrite


def unary(operate: Callable[[Replacement, str, tuple[int, ...]], str]) -> Rewrite:
    """Return the rewrite of an operator of x, x_scale, x_zero, y_scale, y_zero.

    `operate` gets the name of x and its shape; with the attribute `channels_last`, as with channels first.
    """

    def rewrite(new: Replacement) -> Nodes | None:
        shape = new.shape_of(new.inputs[0])
        x = _dequantised(new, *_three(new, 0))
        if not new.attributes.get("channels_last", 0):
            return _quantised(new, operate(new, x, shape), *_three(new, 3)[:2])
        rank = len(shape)
        x = new.op("Transpose", x, perm=to_channels_first(rank))
        y = operate(new, x, (shape[0], shape[-1], *shape[1:-1]))
        y = new.op("Transpose", y, perm=to_channels_last(rank))
        return _quantised(new, y, *_three(new, 3)[:2])

    return rewrite


def leaky_relu(new: Replacement, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearLeakyRelu."""
    return new.op("LeakyRelu", x, alpha=float(new.attributes.get("alpha", 0.01)))


def sigmoid(new: Replacement, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearSigmoid."""
    return new.op("Sigmoid", x)


def softmax(new: Replacement, x: str, shape: tuple[int, ...]) -> str:
    """QLinearSoftmax; the Softmax of an opset before 13 takes all axes from `axis` on for one."""
    given = new.attributes
    axis = int(given.get("axis", -1))
    if int(given.get("opset", _SOFTMAX_OF_ONE_AXIS)) >= _SOFTMAX_OF_ONE_AXIS:
        return new.op("Softmax", x, axis=axis)
    flat = new.op("Flatten", x, axis=axis)
    return new.op("Reshape", new.op("Softmax", flat, axis=-1), new.ints(*shape))


def average_pool(new: Replacement, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearAveragePool."""
    y = new.op("AveragePool", x)
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    new.nodes[-1].attribute.extend(a for a in new.node.attribute if a.name in names)
    return y


def global_average_pool(new: Replacement, x: str, _shape: tuple[int, ...]) -> str:
    """QLinearGlobalAveragePool."""
    return new.op("GlobalAveragePool", x)


def conv(new: Replacement) -> Nodes | None:
    """QLinearConv, which ONNX Runtime writes with channels last; its weights have channels first."""
    shape = new.shape_of(new.inputs[0])
    options = new.attributes
    turned = bool(options.pop("channels_last", 0))
    x, *rest = new.inputs
    if turned:
        x = new.op("Transpose", x, perm=to_channels_first(len(shape)))
    y = new.op("QLinearConv", x, *rest, to="" if turned else new.outputs[0], **options)
    if turned:
        new.op("Transpose", y, perm=to_channels_last(len(shape)), to=new.outputs[0])
    return new.nodes


def concat(new: Replacement) -> Nodes:
    """QLinearConcat of y_scale, y_zero, then tensor, scale, zero for each input."""
    parts = [_dequantised(new, *_three(new, at)) for at in range(2, len(new.inputs), 3)]
    y = new.op("Concat", *parts, axis=int(new.attributes["axis"]))
    return _quantised(new, y, new.inputs[0], new.input(1))


def where(new: Replacement) -> Nodes:
    """QLinearWhere of condition, x, x_scale, x_zero, y, y_scale, y_zero, z_scale, z_zero."""
    yes, no = _dequantised(new, *_three(new, 1)), _dequantised(new, *_three(new, 4))
    return _quantised(new, new.op("Where", new.inputs[0], yes, no), *_three(new, 7)[:2])


def gemm(new: Replacement) -> Nodes:
    """QGemm of a, a_scale, a_zero, b, b_scale, b_zero, and optionally c, y_scale, y_zero."""
    given = new.attributes
    turned = int(given.get("transB", 0))
    a = _dequantised(new, *_three(new, 0))
    b = _dequantised(new, *_three(new, 3), axis=0 if turned else 1)
    operands = [a, b]
    alpha = float(given.get("alpha", 1.0))
    if bias := new.input(6):
        # int32 with the scale of the products.
        scale = new.op("Mul", new.inputs[1], new.inputs[4])
        if alpha != 1.0:
            scale = new.op("Mul", scale, new.constant(alpha, np.float32))
        operands.append(new.op("Mul", new.cast(bias, TensorProto.FLOAT), scale))
    last = not new.input(7)
    turns = {"transA": int(given.get("transA", 0)), "transB": turned}
    y = new.op("Gemm", *operands, to=new.outputs[0] if last else "", alpha=alpha, **turns)
    return new.nodes if last else _quantised(new, y, new.inputs[7], new.input(8))


def matmul_to_float(new: Replacement) -> Nodes | None:
    """MatMulIntegerToFloat of a, b, a_scale, b_scale, and optionally a_zero, b_zero, bias."""
    return _product(new, new.inputs[0], new.inputs[2], new.input(4), 3, 5, 6)


def dynamic_matmul(new: Replacement) -> Nodes | None:
    """DynamicQuantizeMatMul of a, b, b_scale, and optionally b_zero, bias: a is quantised first."""
    quantised, scale, zero = new.op_many("DynamicQuantizeLinear", 3, new.inputs[0])
    return _product(new, quantised, scale, zero, 2, 3, 4)


def _product(
    new: Replacement, a: str, scale: str, zero: str, b_scale: int, b_zero: int, bias: int
) -> Nodes | None:
    """Return the product of bytes `a` with the second input, as float32; numbers are places of inputs."""
    if not new.graph.shape_of(a) and new.graph.shape_of(new.inputs[0]) is None:
        return None
    operands = [a, new.inputs[1]]
    weight_zero = new.input(b_zero)
    if zero or weight_zero:
        operands.append(zero or new.constant(0, np.uint8))
    if weight_zero:
        operands.append(weight_zero)
    sums = new.cast(new.op("MatMulInteger", *operands), TensorProto.FLOAT)
    last = new.input(bias)
    y = new.op("Mul", sums, new.op("Mul", scale, new.inputs[b_scale]), to="" if last else new.outputs[0])
    if last:
        new.op("Add", y, last, to=new.outputs[0])
    return new.nodes


def matmul_n_bits(new: Replacement) -> Nodes | None:
    """MatMulNBits of a, codes, scales, and optionally zero points, group indices (refused) and bias.

    The codes, `[N, blocks, block_size * bits / 8]`, become a matrix `[K, N]` that is dequantised in blocks,
    as ONNX has it since opset 21; with an older opset, or with zero points in float, one of float32.
    """
    given = new.attributes
    bits, size = int(given.get("bits", 4)), int(given["block_size"])
    depth, columns = int(given["K"]), int(given["N"])
    codes, scales = new.graph.constant(new.inputs[1]), new.graph.constant(new.inputs[2])
    if codes is None or scales is None or bits not in (4, 8) or new.input(4):
        return None
    blocks = -(-depth // size)
    values = codes_of(codes.reshape(columns, blocks, -1), bits)
    zeros = np.full((columns, blocks), 2 ** (bits - 1), np.uint8)
    whole = True
    if zero := new.input(3):
        given_zeros = new.graph.constant(zero)
        if given_zeros is None:
            return None
        whole = given_zeros.dtype == np.uint8
        flat = codes_of(given_zeros.reshape(columns, -1), bits)[:, :blocks] if whole else given_zeros
        zeros = flat.reshape(columns, blocks)
    factors = scales.reshape(columns, blocks).astype(np.float32)
    last = new.input(5)
    if whole and new.graph.opset >= WITH_BLOCKS:
        parts = (values.reshape(columns, -1)[:, :depth], factors, zeros)
        names = [new.constant(np.ascontiguousarray(part.T), part.dtype) for part in parts]
        matrix = new.op("DequantizeLinear", *names, axis=0, block_size=size)
    else:
        steps = values.astype(np.float32) - zeros.astype(np.float32)[:, :, None]
        weights = (steps * factors[:, :, None]).reshape(columns, -1)[:, :depth]
        matrix = new.constant(np.ascontiguousarray(weights.T), np.float32)
    y = new.op("MatMul", new.inputs[0], matrix, to="" if last else new.outputs[0])
    if last:
        new.op("Add", y, last, to=new.outputs[0])
    return new.nodes


def codes_of(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return unsigned codes of `bits` each, which are packed along the last axis, the lowest bits first."""
    if bits == 8:
        return packed
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(*packed.shape[:-1], packed.shape[-1] * _NIBBLES)


def same_in_onnx(new: Replacement) -> Nodes:
    """QuantizeLinear and DequantizeLinear, which ONNX now defines for the same types."""
    node = helper.make_node(new.node.op_type, list(new.inputs), list(new.outputs), name=new.node.name)
    node.attribute.extend(new.node.attribute)
    return [node]


def _three(new: Replacement, first: int) -> tuple[str, str, str]:
    """Return the names of a tensor, its scale and its zero point, from the input `first` on."""
    return new.input(first), new.input(first + 1), new.input(first + 2)


def _dequantised(new: Replacement, x: str, scale: str, zero: str, axis: int = 1) -> str:
    return new.op("DequantizeLinear", x, scale, *([zero] if zero else []), axis=axis)


def _quantised(new: Replacement, y: str, scale: str, zero: str) -> Nodes:
    return new.result("QuantizeLinear", y, scale, *([zero] if zero else []))
