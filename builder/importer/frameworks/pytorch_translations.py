"""How the quantising operators of PyTorch's programs become ONNX.

Part of `pytorch_process.py`, which a Python with PyTorch runs: it imports nothing of edgebundle. torchlib's
own translations ignore ranges of fewer steps than the datatype has, and old ones lack some operators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def translations() -> dict[Any, Callable[..., Any]]:
    """Return the operators and their translations, as `torch.onnx.export` takes them."""
    import torch

    operators = torch.ops.quantized_decomposed
    if not hasattr(operators, "dequantize_per_channel"):
        return {}
    per_tensor = operators.quantize_per_tensor
    import numpy as np
    import onnx_ir as ir
    from onnxscript import opset20 as op

    # Full ranges: torch.dtype -> smallest and largest number.
    ranges = {
        torch.uint8: (0, 255),
        torch.int8: (-128, 127),
        torch.int16: (-32768, 32767),
        torch.uint16: (0, 65535),
        torch.int32: (-(1 << 31), (1 << 31) - 1),
    }
    numpy_types = {
        torch.uint8: np.uint8,
        torch.int8: np.int8,
        torch.int16: np.int16,
        torch.uint16: np.uint16,
        torch.int32: np.int32,
    }

    def kind(dtype: Any) -> Any:
        # The exporter gives torchlib's functions ONNX's number of a type.
        wanted = {int(ir.DataType.from_numpy(np.dtype(v))): k for k, v in numpy_types.items()}
        return dtype if isinstance(dtype, torch.dtype) else wanted[int(dtype)]

    def constant(value: Any, dtype: Any) -> Any:
        return op.Constant(value=ir.tensor(np.asarray(value, dtype)))

    def is_number(value: Any) -> bool:
        return isinstance(value, (int, float))

    def per_tensor_q(
        input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: Any
    ) -> Any:
        dtype = kind(dtype)
        if is_number(scale) and is_number(zero_point):
            low, high = ranges[dtype]
            if quant_min > low or quant_max < high:
                # As PyTorch clamps steps; in real numbers, where other activations are clamped too.
                input = op.Clip(
                    input,
                    constant((quant_min - zero_point) * scale, np.float32),
                    constant((quant_max - zero_point) * scale, np.float32),
                )
            return op.QuantizeLinear(
                input, constant(scale, np.float32), constant(zero_point, numpy_types[dtype])
            )
        scaled = op.Round(op.Div(input, op.Cast(op.Reshape(scale, constant([], np.int64)), to=1)))
        zero = op.Cast(op.Reshape(zero_point, constant([], np.int64)), to=1)
        steps = op.Clip(
            op.Add(scaled, zero), constant(quant_min, np.float32), constant(quant_max, np.float32)
        )
        return op.Cast(steps, to=int(ir.DataType.from_numpy(np.dtype(numpy_types[dtype]))))

    def per_tensor_dq(
        input: Any,
        scale: Any,
        zero_point: Any,
        quant_min: int,
        quant_max: int,
        dtype: Any,
        out_dtype: Any = None,
    ) -> Any:
        del quant_min, quant_max, out_dtype
        dtype = kind(dtype)
        if is_number(scale) and is_number(zero_point):
            return op.DequantizeLinear(
                input, constant(scale, np.float32), constant(zero_point, numpy_types[dtype])
            )
        zero = op.Cast(op.Reshape(zero_point, constant([], np.int64)), to=1)
        return op.Mul(
            op.Sub(op.Cast(input, to=1), zero),
            op.Cast(op.Reshape(scale, constant([], np.int64)), to=1),
        )

    def zeros(zero_points: Any, dtype: Any) -> Any:
        return op.Cast(zero_points, to=int(ir.DataType.from_numpy(np.dtype(numpy_types[kind(dtype)]))))

    def per_channel_q(
        input: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: Any
    ) -> Any:
        steps = op.QuantizeLinear(input, op.Cast(scales, to=1), zeros(zero_points, dtype), axis=axis)
        low, high = ranges[kind(dtype)]
        if quant_min > low or quant_max < high:
            numpy_type = numpy_types[kind(dtype)]
            steps = op.Clip(steps, constant(quant_min, numpy_type), constant(quant_max, numpy_type))
        return steps

    def per_channel_dq(
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
        return op.DequantizeLinear(input, scales, zeros(zero_points, dtype), axis=axis)

    def choose(input: Any, quant_min: int, quant_max: int, eps: float, dtype: Any) -> Any:
        del dtype
        zero = constant(0, np.float32)
        low = op.Min(op.ReduceMin(input, keepdims=0), zero)
        high = op.Max(op.ReduceMax(input, keepdims=0), zero)
        scale = op.Max(
            op.Div(op.Sub(high, low), constant(quant_max - quant_min, np.float32)), constant(eps, np.float32)
        )
        point = op.Sub(constant(quant_min, np.float32), op.Round(op.Div(low, scale)))
        point = op.Clip(point, constant(quant_min, np.float32), constant(quant_max, np.float32))
        return op.Cast(scale, to=11), op.Cast(point, to=7)

    table = {per_tensor.default: per_tensor_q, per_tensor.tensor: per_tensor_q}
    dequantize = operators.dequantize_per_tensor
    table |= {dequantize.default: per_tensor_dq, dequantize.tensor: per_tensor_dq}
    table |= {operators.quantize_per_channel.default: per_channel_q}
    table |= {operators.dequantize_per_channel.default: per_channel_dq}
    with contextlib.suppress(AttributeError):
        table |= {operators.choose_qparams.tensor: choose}
    return table
