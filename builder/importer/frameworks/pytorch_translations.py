"""How the quantising operators of PyTorch's programs become ONNX.

Part of `pytorch_process.py`, which imports it in a Python with PyTorch: it imports nothing of edgebundle.
torchlib's own translations ignore ranges of fewer steps than the datatype has, and old ones lack some
operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset20 as op

_TYPES: Final = MappingProxyType(
    {
        torch.uint8: np.uint8,
        torch.int8: np.int8,
        torch.int16: np.int16,
        torch.uint16: np.uint16,
        torch.int32: np.int32,
    }
)
# The exporter gives torchlib's functions ONNX's number of a type.
_OF_ONNX: Final = MappingProxyType({int(ir.DataType.from_numpy(np.dtype(v))): v for v in _TYPES.values()})


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the operators and their translations, as `torch.onnx.export` takes them."""
    operators = torch.ops.quantized_decomposed
    quantize, dequantize = operators.quantize_per_tensor, operators.dequantize_per_tensor
    table: dict[Any, Callable[..., Any]] = {
        quantize.default: _quantized,
        quantize.tensor: _quantized,
        dequantize.default: _dequantized,
        dequantize.tensor: _dequantized,
        operators.quantize_per_channel.default: _quantized_channels,
        operators.dequantize_per_channel.default: _dequantized_channels,
    }
    with contextlib.suppress(AttributeError):
        table[operators.choose_qparams.tensor] = _scale_and_zero_point
    return table


# The names of these functions' parameters are those of PyTorch's operators.
def _quantized(input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any) -> Any:
    dtype = _numpy_type(dtype)
    if _is_number(scale) and _is_number(zero_point):
        if _is_narrower(quant_min, quant_max, dtype):
            # As PyTorch clamps steps; in real numbers, where other activations are clamped too.
            low, high = (_constant((step - zero_point) * scale) for step in (quant_min, quant_max))
            input = op.Clip(input, low, high)
        return op.QuantizeLinear(input, _constant(scale), _constant(zero_point, dtype))
    scaled = op.Round(op.Div(input, _scalar(scale)))
    steps = op.Clip(op.Add(scaled, _scalar(zero_point)), _constant(quant_min), _constant(quant_max))
    return op.Cast(steps, to=int(ir.DataType.from_numpy(np.dtype(dtype))))


def _dequantized(
    input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any, out_dtype: Any = None
) -> Any:
    del quant_min, quant_max, out_dtype
    if _is_number(scale) and _is_number(zero_point):
        return op.DequantizeLinear(input, _constant(scale), _constant(zero_point, _numpy_type(dtype)))
    return op.Mul(op.Sub(op.Cast(input, to=1), _scalar(zero_point)), _scalar(scale))


def _quantized_channels(
    input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: Any
) -> Any:
    dtype = _numpy_type(dtype)
    steps = op.QuantizeLinear(input, op.Cast(scales, to=1), _zero_points(zero_points, dtype), axis=axis)
    if _is_narrower(quant_min, quant_max, dtype):
        steps = op.Clip(steps, _constant(quant_min, dtype), _constant(quant_max, dtype))
    return steps


def _dequantized_channels(
    input: Any,
    scales: Any,
    zero_points: Any,
    axis: int,
    quant_min: int,
    quant_max: int,
    dtype: Any,
    out_dtype: Any = None,
) -> Any:
    del quant_min, quant_max, out_dtype
    scales = op.Cast(scales, to=1)
    if zero_points is None:
        return op.DequantizeLinear(input, scales, axis=axis)
    return op.DequantizeLinear(input, scales, _zero_points(zero_points, _numpy_type(dtype)), axis=axis)


def _scale_and_zero_point(input: Any, quant_min: int, quant_max: int, eps: float, dtype: Any) -> Any:
    del dtype
    zero = _constant(0)
    low = op.Min(op.ReduceMin(input, keepdims=0), zero)
    high = op.Max(op.ReduceMax(input, keepdims=0), zero)
    scale = op.Max(op.Div(op.Sub(high, low), _constant(quant_max - quant_min)), _constant(eps))
    point = op.Sub(_constant(quant_min), op.Round(op.Div(low, scale)))
    point = op.Clip(point, _constant(quant_min), _constant(quant_max))
    return op.Cast(scale, to=11), op.Cast(point, to=7)


def _numpy_type(dtype: Any) -> Any:
    return _TYPES[dtype] if isinstance(dtype, torch.dtype) else _OF_ONNX[int(dtype)]


def _is_narrower(quant_min: int, quant_max: int, dtype: Any) -> bool:
    """Whether a range has fewer steps than its type."""
    return bool(quant_min > np.iinfo(dtype).min or quant_max < np.iinfo(dtype).max)


def _constant(value: Any, dtype: Any = np.float32) -> Any:
    return op.Constant(value=ir.tensor(np.asarray(value, dtype)))


def _scalar(value: Any) -> Any:
    return op.Cast(op.Reshape(value, _constant([], np.int64)), to=1)


def _zero_points(values: Any, dtype: Any) -> Any:
    return op.Cast(values, to=int(ir.DataType.from_numpy(np.dtype(dtype))))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))
