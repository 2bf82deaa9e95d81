"""Convolutions and matrix products of com.microsoft, with what ONNX Runtime fuses into them.

Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

from typing import Any, Final

from builder.importer.rewrites.microsoft.activations import activate
from builder.importer.rewrites.replacement import Nodes, Replacement

_LINEAR: Final = 20
_CONV_ATTRIBUTES: Final = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_POOL_ATTRIBUTES: Final = ("auto_pad", "ceil_mode", "dilations", "kernel_shape", "pads", "strides")
_GEMM_ATTRIBUTES: Final = ("alpha", "beta", "transA", "transB")


def fused_conv(new: Replacement) -> Nodes | None:
    """FusedConv of x, weights, bias and z: activation(Conv(x) + z)."""
    return _conv(new, channels_last=False)


def nhwc_conv(new: Replacement) -> Nodes | None:
    """NhwcConv and NhwcFusedConv: the same on [N, ..., C]; the weights are [M, ..., C / group]."""
    return _conv(new, channels_last=True)


def _conv(new: Replacement, *, channels_last: bool) -> Nodes | None:
    options = new.attributes
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    rank = len(shape)
    first, back = to_channels_first(rank), to_channels_last(rank)
    x, weight = new.inputs[:2]
    if channels_last:
        x, weight = new.op("Transpose", x, perm=first), new.op("Transpose", weight, perm=first)
    bias = [name] if (name := new.input(2)) else []
    kept = {name: options[name] for name in _CONV_ATTRIBUTES if name in options}
    y = new.op("Conv", x, weight, *bias, **kept)
    if z := new.input(3):
        y = new.op("Add", y, new.op("Transpose", z, perm=first) if channels_last else z)
    last = "" if channels_last else new.outputs[0]
    parameters = list(options.get("activation_params", []))
    made = activate(new, y, str(options.get("activation", "")), parameters, found.dtype, last)
    if made is None:
        return None
    if channels_last:
        new.op("Transpose", made, perm=back, to=new.outputs[0])
    return new.nodes


def to_channels_first(rank: int) -> list[int]:
    """The permutation that moves channels from the last axis to the second."""
    return [0, rank - 1, *range(1, rank - 1)]


def to_channels_last(rank: int) -> list[int]:
    """The permutation that moves channels from the second axis to the last."""
    return [0, *range(2, rank), 1]


def nhwc_max_pool(new: Replacement) -> Nodes | None:
    """NhwcMaxPool: MaxPool on [N, ..., C]."""
    options = new.attributes
    shape = new.shape_of(new.inputs[0])
    kept = {name: options[name] for name in _POOL_ATTRIBUTES if name in options}
    x = new.op("MaxPool", new.op("Transpose", new.inputs[0], perm=to_channels_first(len(shape))), **kept)
    return new.result("Transpose", x, perm=to_channels_last(len(shape)))


def fused_gemm(new: Replacement) -> Nodes | None:
    """FusedGemm: the activation of a Gemm."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    kept = {name: options[name] for name in _GEMM_ATTRIBUTES if name in options}
    y = new.op("Gemm", *new.inputs, **kept)
    made = activate(
        new, y, str(options.get("activation", "")), _parameters(options), found.dtype, new.outputs[0]
    )
    return None if made is None else new.nodes


def _parameters(options: dict[str, Any]) -> list[float]:
    names = [f"activation_{name}" for name in ("alpha", "beta", "gamma")]
    given = [name in options for name in names]
    count = max((index + 1 for index, there in enumerate(given) if there), default=0)
    return [float(options.get(name, 0.0)) for name in names[:count]]


def fused_matmul(new: Replacement) -> Nodes | None:
    """FusedMatMul, TransposeMatMul: alpha A B, each operand transposed before.

    `transA` swaps the last two axes. `transBatchA` moves the first axis to the place before the last.
    """
    options = new.attributes
    found = new.type_of(new.inputs[0])
    operands = []
    for name, side in zip(new.inputs, "AB", strict=True):
        shape = new.graph.shape_of(name)
        if shape is None:
            return None
        swap = bool(options.get(f"trans{side}", 0))
        order = _order(len(shape), swap=swap, batch=bool(options.get(f"transBatch{side}", 0)))
        operands.append(name if order == list(range(len(shape))) else new.op("Transpose", name, perm=order))
    alpha = float(options.get("alpha", 1.0))
    product = new.op("MatMul", *operands, to=new.outputs[0] if alpha == 1 else "")
    if alpha != 1:
        new.op("Mul", product, new.constant(alpha, found.dtype), to=new.outputs[0])
    return new.nodes


def _order(rank: int, *, swap: bool, batch: bool) -> list[int]:
    """The axes of an operand of FusedMatMul, in the order that MatMul takes."""
    order = list(range(rank))
    if rank < 2:
        return order
    if batch and rank > 2:
        order = [*range(1, rank - 1), 0, rank - 1]
    if swap:
        order[-2:] = order[:-3:-1]
    return order


def same_operator(new: Replacement) -> Nodes | None:
    """Trilu, Range and GatherND: as ONNX's own operators of the same names."""
    return new.result(new.node.op_type, *new.inputs, **new.attributes)


def grid_sample(new: Replacement) -> Nodes | None:
    """GridSample: as ONNX's own, whose modes have other names from opset 20 on."""
    options = new.attributes
    mode = str(options.get("mode", "bilinear"))
    if new.graph.opset >= _LINEAR:
        mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    return new.result("GridSample", *new.inputs, **{**options, "mode": mode})


def expand_dims(new: Replacement) -> Nodes | None:
    """ExpandDims: Unsqueeze at one axis."""
    axis = new.graph.constant(new.inputs[1])
    if axis is None or axis.size != 1:
        return None
    return new.result("Unsqueeze", new.inputs[0], new.ints(int(axis.reshape(()))))


def pad(new: Replacement) -> Nodes | None:
    """Pad: as ONNX's, with pads [2 rank] or [1, 2 rank]."""
    pads = new.graph.constant(new.inputs[1])
    if pads is None:
        return None
    value = [name] if (name := new.input(2)) else []
    if value and new.graph.shape_of(value[0]) != ():
        value = [new.op("Reshape", value[0], new.constant([], "int64"))]
    mode = str(new.attributes.get("mode", "constant"))
    return new.result("Pad", new.inputs[0], new.ints(*pads.reshape(-1).tolist()), *value, mode=mode)
