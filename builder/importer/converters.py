"""Converters of our own in TVM's front end: what all of them share, and those of a few lines.

Those of products are in `integer_products`, of recurrent layers in `recurrent_call`, of what stays a node in
`classic/kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import helper
from tvm import relax, te, tirx
from tvm.ir import GenericConst, is_prim_expr
from tvm.relax.frontend.onnx import onnx_frontend

from builder.calls.blocked_weights import TYPES, BlockedWeights

Inputs: TypeAlias = Sequence[relax.Expr]  # None for an absent one
Attributes: TypeAlias = Mapping[str, Any]
# Converts a node, or returns None to leave it to TVM.
Convert: TypeAlias = Callable[[relax.BlockBuilder, Inputs, Attributes], relax.Expr | None]

_BYTES_OF_INT: Final = 4
_PAD_MODES: Final = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


class Converter:
    """A converter in the form in which TVM's front end asks for it.

    `theirs`: TVM's own converter, which gets the nodes that `convert` leaves.
    """

    def __init__(self, convert: Convert, theirs: Any = None) -> None:  # noqa: ANN401 - TVM has no types
        self._convert, self._theirs = convert, theirs

    def get_converter(self, opset: int) -> Callable[..., relax.Expr]:
        """Return the converter of an opset."""

        def convert(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes, params: object) -> relax.Expr:
            made = self._convert(bb, inputs, attrs)
            return self._theirs.get_converter(opset)(bb, inputs, attrs, params) if made is None else made

        return convert


def cast(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr | None:
    """Cast floats to integers, and read each number once.

    TVM's front end tests whether a number is finite, and wraps what is too large, in operators that read it
    up to six times. Written into the kernel of a Resize, they make its expression six times as large.
    """
    x, dtype = inputs[0], np.dtype(helper.tensor_dtype_to_np_dtype(int(attrs["to"])))
    is_tensor = not (x is None or isinstance(x, relax.ShapeExpr | GenericConst) or is_prim_expr(x))
    if not is_tensor or dtype.kind not in "iu" or "float" not in str(x.ty.dtype):
        return None
    # Integers that are cut to fewer bits wrap.
    wide = "int32" if dtype.itemsize < _BYTES_OF_INT or dtype == np.int32 else "int64"
    return relax.op.astype(bb.emit(relax.op.astype(x, wide)), dtype.name)


def bit_cast(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr:
    """BitCast, the same bits as another type, which TVM's front end has no converter for."""
    x = inputs[0]
    dtype = str(helper.tensor_dtype_to_np_dtype(int(attrs["to"])))
    # LLVM has one bit for a boolean, memory a byte.
    if "bool" in (str(x.ty.dtype), dtype):
        return bb.emit(relax.op.astype(x, dtype))

    def reinterpret(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *place: tirx.reinterpret(dtype, x(*place)), name="bit_cast")

    return bb.emit_te(reinterpret, x)


class Padding(onnx_frontend.Pad):  # type: ignore[misc]  # TVM has no types
    """TVM's converter of Pad, but for float32 with an operator of Relax, which later passes know."""

    @classmethod
    def _lower_pad(
        cls, bb: relax.BlockBuilder, inputs: Inputs, attr: Attributes, params: object, allowed_modes: set[str]
    ) -> relax.Expr:
        before, after, value = cls._parse_pads_and_axes(inputs, params)
        mode = attr.get("mode", b"constant").decode()
        plain = str(inputs[0].ty.dtype) == "float32" and min((*before, *after), default=-1) >= 0
        if mode not in allowed_modes or not plain:
            return super()._lower_pad(bb, inputs, attr, params, allowed_modes)
        widths = [int(width) for pair in zip(before, after, strict=True) for width in pair]
        return bb.emit(relax.op.nn.pad(inputs[0], widths, _PAD_MODES[mode], float(value)))


def dequantise_blocks(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr | None:
    """DequantizeLinear of constants with a scale for each block: a matrix stays one of few bits."""
    block = int(attrs.get("block_size", 0))
    given = [value for value in inputs if value is not None]
    if not block or len(given) < 2 or not all(isinstance(value, GenericConst) for value in given):
        return None
    codes, scales, *rest = (value.value.numpy() for value in given)
    zeros = rest[0] if rest else np.zeros(scales.shape, codes.dtype)
    if str(codes.dtype) not in TYPES or scales.dtype != np.float32:
        return None
    axis = int(attrs.get("axis", 1)) % max(codes.ndim, 1)
    if codes.ndim == 2:
        return BlockedWeights(codes, scales, zeros, axis, block).emit(bb)
    index = np.arange(codes.shape[axis]) // block
    steps = codes.astype(np.float32) - np.take(zeros, index, axis).astype(np.float32)
    return relax.const(np.asarray(steps * np.take(scales, index, axis), np.float32))
