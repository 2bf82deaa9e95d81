"""ConvInteger in a Relax module: a convolution of bytes, whose sums are int32.

The input is padded with its zero point, which stands for the number 0 and is mostly computed at run time
(DynamicQuantizeLinear). So what it adds to the sums is the same everywhere, and computed apart:

    sum((x - zx) * w)  =  sum(x * w) - zx * sum(w)

The rewrite of the operator (`rewrites/quantised.py`) leaves those to this converter that it can take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from tvm import relax
from tvm.ir import GenericConst

from builder.calls.byte_weights import ByteWeights
from builder.errors import FrontEndError

NAME: Final = "ConvInteger"
_PICTURE: Final = 4

Convert = Callable[..., relax.Expr]


class IntegerConvolution:
    """Converts ConvInteger, in the form in which TVM's front end asks for it."""

    def get_converter(self, opset: int) -> Convert:
        """Return the converter of an opset."""
        del opset
        return _convert


def _convert(
    bb: relax.BlockBuilder, inputs: Sequence[relax.Expr | None], attrs: Mapping[str, Any], params: object
) -> relax.Expr:
    """Convert ConvInteger of x, w, x_zero, w_zero, without groups, in one or two dimensions."""
    del params
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
