"""DequantizeLinear with blocks in a Relax module: weights of few bits stay so, where they are a matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend

from builder.calls.blocked_weights import TYPES, BlockedWeights


class BlockedDequantisation:
    """Converts DequantizeLinear with blocks, in the form in which TVM's front end asks for it."""

    def get_converter(self, opset: int) -> Callable[..., relax.Expr]:
        """Return the converter of an opset."""
        original: Callable[..., relax.Expr] = onnx_frontend.DequantizeLinear.get_converter(opset)

        def convert(
            bb: relax.BlockBuilder,
            inputs: Sequence[relax.Expr | None],
            attrs: Mapping[str, Any],
            params: object,
        ) -> relax.Expr:
            block = int(attrs.get("block_size", 0))
            if not block:
                return original(bb, inputs, attrs, params)
            found = _numbers([*inputs, None][:3])
            if found is None:
                return original(bb, inputs, attrs, params)
            codes, scales, zeros = found
            axis = int(attrs.get("axis", 1)) % max(codes.ndim, 1)
            if codes.ndim == 2:
                return BlockedWeights(codes, scales, zeros, axis, block).emit(bb)
            index = np.arange(codes.shape[axis]) // block
            steps = codes.astype(np.float32) - np.take(zeros, index, axis).astype(np.float32)
            return relax.const(np.asarray(steps * np.take(scales, index, axis), np.float32))

        return convert


def _numbers(inputs: Sequence[relax.Expr | None]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Return codes, scales and zero points, None unless all are constant, of bytes and float32."""
    given = [i for i in inputs if i is not None]
    if len(given) < 2 or not all(isinstance(i, GenericConst) for i in given):
        return None
    codes, scales, *rest = (i.value.numpy() for i in given)
    zeros = rest[0] if rest else np.zeros(scales.shape, codes.dtype)
    if str(codes.dtype) not in TYPES or scales.dtype != np.float32:
        return None
    return codes, scales, zeros
