"""MatMulInteger and ConvInteger in a Relax module: products of bytes, whose sums are int32.

TVM's front end widens both operands to int32 first, which hides that they are bytes. Here the operands stay
bytes, and what their zero points add is computed apart:

    sum((x - zx) * w)  =  sum(x * w) - zx * sum(w),  with the zero point of w subtracted from w

A picture is padded with its zero point, which stands for the number 0 and is mostly computed at run time
(DynamicQuantizeLinear), so that it adds the same everywhere. The rewrite of ConvInteger
(`rewrites/quantised.py`) leaves those to its converter that it can take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from builder.calls.byte_weights import ByteWeights
from builder.errors import FrontEndError
from builder.importer.converters import Attributes, Inputs

_BYTES: Final = ("uint8", "int8")
_PICTURE: Final = 4


def matmul(bb: relax.BlockBuilder, inputs: Inputs, _attrs: Attributes) -> relax.Expr | None:
    """MatMulInteger of a, b, a_zero, b_zero; None unless b is a constant matrix."""
    a, b, a_zero, b_zero = [*inputs, None, None][:4]
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


def convolution(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr:
    """ConvInteger of x, w, x_zero, w_zero, without groups, in one or two dimensions."""
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    if x is None or not isinstance(w, GenericConst):
        raise FrontEndError("expected a constant weight of ConvInteger, got another")
    numbers = w.value.numpy().astype(np.int64)
    if isinstance(w_zero, GenericConst):
        zeros = w_zero.value.numpy().astype(np.int64).reshape(-1)
        numbers = numbers - zeros.reshape(-1, *[1] * (numbers.ndim - 1))
    weights = ByteWeights.of(numbers, 0)
    if weights is None:
        raise FrontEndError("expected weights of ConvInteger that span 256 numbers, got more")
    n, channels, *extents = (int(d) for d in x.ty.shape)
    spatial = len(extents)
    strides, dilation = (list(attrs.get(name) or [1] * spatial) for name in ("strides", "dilations"))
    pads = [int(p) for p in attrs.get("pads") or [0] * 2 * spatial]
    before, after = pads[:spatial], pads[spatial:]
    kernel = weights.numbers
    if spatial + 2 < _PICTURE:
        x = bb.emit(relax.op.reshape(x, (n, channels, 1, *extents)))
        kernel, extents = np.expand_dims(kernel, 2), [1, *extents]
        strides, dilation, before, after = [1, *strides], [1, *dilation], [0, *before], [0, *after]
    zero = None if x_zero is None else bb.emit(relax.op.reshape(x_zero, ()))
    data = _padded(bb, x, zero, extents, before, after)

    def convolve(filters: np.ndarray) -> relax.Expr:
        return bb.emit(
            relax.op.nn.conv2d(
                data, relax.const(filters), strides=strides, dilation=dilation, out_dtype="int32"
            )
        )

    def per_channel(values: np.ndarray) -> relax.Expr:
        return relax.const(values.reshape(1, -1, 1, 1).astype("int32"))

    sums = convolve(kernel)
    if weights.moved.any():
        window = convolve(np.ones((1, *kernel.shape[1:]), np.int8))
        sums = bb.emit(relax.op.add(sums, bb.emit(relax.op.multiply(window, per_channel(weights.moved)))))
    if zero is not None:
        point = bb.emit(relax.op.astype(zero, "int32"))
        added = bb.emit(relax.op.multiply(point, per_channel(weights.total)))
        sums = bb.emit(relax.op.subtract(sums, added))
    if spatial + 2 < _PICTURE:
        return bb.emit(relax.op.squeeze(sums, [2]))
    return sums


def _padded(
    bb: relax.BlockBuilder,
    x: relax.Expr,
    zero: relax.Expr | None,
    extents: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
) -> relax.Expr:
    """Return pictures with their zero point around them: 0 if there is none."""
    if not any((*before, *after)):
        return x
    widths = [0, 0, 0, 0, *(width for both in zip(before, after, strict=True) for width in both)]
    padded = bb.emit(relax.op.nn.pad(x, widths, pad_value=0))
    if zero is None:
        return padded
    inside = np.zeros([1, 1, *(b + e + a for b, e, a in zip(before, extents, after, strict=True))], np.bool_)
    (top, left), (height, width) = before, extents
    inside[0, 0, top : top + height, left : left + width] = True
    return bb.emit(relax.op.where(relax.const(inside), padded, zero))
