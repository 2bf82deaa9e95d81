"""MatMulInteger in a Relax module: a product of bytes, whose sums are int32.

TVM's front end widens both operands to int32 first, which hides that they are bytes. Here the operands stay
bytes, and what their zero points add is computed apart:

    sum((a - za) * w)  =  sum(a * w) - za * sum(w),  with  w = b - zb
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax
from tvm.ir import GenericConst
from tvm.relax.frontend.onnx import onnx_frontend

from builder.calls.byte_weights import ByteWeights

NAME: Final = "MatMulInteger"
_BYTES: Final = ("uint8", "int8")

Convert = Callable[..., relax.Expr]


class IntegerProduct:
    """Converts MatMulInteger, in the form in which TVM's front end asks for it."""

    def get_converter(self, opset: int) -> Convert:
        """Return the converter of an opset."""
        original: Convert = onnx_frontend.MatMulInteger.get_converter(opset)

        def convert(
            bb: relax.BlockBuilder,
            inputs: Sequence[relax.Expr | None],
            attrs: Mapping[str, Any],
            params: object,
        ) -> relax.Expr:
            product = _product(bb, [*inputs, None, None])
            return original(bb, inputs, attrs, params) if product is None else product

        return convert


def _product(bb: relax.BlockBuilder, inputs: Sequence[relax.Expr | None]) -> relax.Expr | None:
    """Return the product, None unless the right operand is a constant matrix."""
    a, b, a_zero, b_zero = inputs[:4]
    if a is None or str(a.ty.dtype) not in _BYTES or not isinstance(b, GenericConst):
        return None
    weights = b.value.numpy().astype(np.int64)
    if weights.ndim != 2 or (b_zero is not None and not isinstance(b_zero, GenericConst)):
        return None
    if b_zero is not None:
        weights = weights - b_zero.value.numpy().astype(np.int64)
    parts = ByteWeights.of(weights, 1)
    if parts is None:
        return None
    sums = bb.emit(relax.op.matmul(a, relax.const(parts.numbers), out_dtype="int32"))
    if parts.moved.any():
        wide = bb.emit(relax.op.astype(a, "int32"))
        rows = bb.emit(relax.op.sum(wide, axis=[-1], keepdims=len(a.ty.shape) > 1))
        moved = relax.const(parts.moved.astype("int32"))
        sums = bb.emit(relax.op.add(sums, bb.emit(relax.op.multiply(rows, moved))))
    if a_zero is None:
        return sums
    points = tuple(int(d) for d in a_zero.ty.shape)
    if len(points) > 1:
        return None
    zero = bb.emit(relax.op.astype(a_zero, "int32"))
    if points not in ((), (1,)):  # one for each row
        zero = bb.emit(relax.op.reshape(zero, (*points, 1)))
    added = bb.emit(relax.op.multiply(zero, relax.const(parts.total.astype("int32"))))
    return bb.emit(relax.op.subtract(sums, added))
