"""Rewrites one-dimensional and transposed convolutions as two-dimensional ones, which have design spaces.

A one-dimensional convolution becomes one of images with a height of one. Element-wise operators between two
such convolutions become four-dimensional too, so that they are fused with them. A transposed convolution of
stride s becomes s*s convolutions of the input, one for each position inside a stride, whose results are
interleaved: no product with an inserted zero is computed (Shi et al., "Is the deconvolution layer the same as
a convolutional layer?", 2016).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import Values, constant_of, op_name, rewrite_main, shape_of

_RANK: Final = 3  # of the input of a one-dimensional convolution
_UNARY: Final = {
    f"relax.{n}"
    for n in (
        "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "tanh", "sigmoid",
        "erf", "exp", "abs", "negative", "sqrt", "square", "clip",
    )
}  # fmt: skip
_BINARY: Final = {
    f"relax.{n}" for n in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
}


class _FourDimensional(Values):
    """A table in which values `[N, C, W]` may exist as `[N, C, 1, W]`, and in their own shape on demand.

    Attributes
    ----------
    images
        Old variable -> its value as `[N, C, 1, W]`.
    """

    def __init__(self, bb: relax.BlockBuilder) -> None:
        super().__init__(bb)
        self.images: dict[relax.Var, relax.Expr] = {}

    def plain(self, expr: relax.Expr) -> relax.Expr:
        if isinstance(expr, relax.Var) and expr not in self._plain:
            self.define(expr, self.bb.emit(relax.op.squeeze(self.images[expr], [2])))
        return super().plain(expr)

    def as_image(self, expr: relax.Expr) -> relax.Expr:
        """Return `expr`, `[N, C, W]`, as `[N, C, 1, W]`."""
        if isinstance(expr, relax.Var) and expr in self.images:
            return self.images[expr]
        numbers = constant_of(expr)
        if numbers is not None:
            return relax.const(np.expand_dims(numbers, 2), str(numbers.dtype))
        new = self.bb.emit(relax.op.expand_dims(self.plain(expr), 2))
        if isinstance(expr, relax.Var):
            self.images[expr] = new
        return new


def to_conv2d(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the one-dimensional and the transposed convolutions of `mod`.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    """
    t = relax.transform
    passes = [t.Normalize(), t.ConvertToDataflow(min_size=1), t.CanonicalizeBindings()]
    return rewrite_main(tvm.transform.Sequential(passes)(mod), _emit, _FourDimensional)


def _emit(table: _FourDimensional, var: relax.Var, call: Call) -> bool:
    name = op_name(call)
    if name == "relax.nn.conv1d":
        new = _one_dimension(table, call)
    elif name == "relax.nn.conv2d_transpose":
        new = _transposed(table, table.plain(call.args[0]), call)
        if new is not None:
            table.define(var, new)
        return new is not None
    elif name in _UNARY | _BINARY:
        new = _between(table, call)
    else:
        return False
    if new is None:
        return False
    table.images[var] = table.bb.emit(new)
    return True


def _one_dimension(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a one-dimensional convolution as a two-dimensional one, None unless it is NCW float32."""
    attrs = call.attrs
    if attrs.data_layout != "NCW" or attrs.kernel_layout != "OIW" or str(call.ty.dtype) != "float32":
        return None
    padding = [int(p) for p in attrs.padding]
    left, right = padding if len(padding) > 1 else padding * 2
    return relax.op.nn.conv2d(
        table.as_image(call.args[0]),
        table.as_image(call.args[1]),
        strides=(1, int(attrs.strides[0])),
        padding=(0, left, 0, right),
        dilation=(1, int(attrs.dilation[0])),
        groups=int(attrs.groups),
    )


def _between(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return an element-wise operator in four dimensions, None if no operand is four-dimensional yet."""
    tensors = [a for a in call.args if isinstance(a, relax.Var)]
    if not any(v in table.images for v in tensors) or len(shape_of(call)) != _RANK:
        return None
    args = []
    for arg in call.args:
        rank = len(shape_of(arg)) if isinstance(arg.ty, relax.TensorType) else 0
        if rank == _RANK:
            args.append(table.as_image(arg))
        elif rank == 0:
            args.append(table.plain(arg))
        else:
            return None
    return Call(call.op, args, call.attrs)


def _transposed(table: _FourDimensional, x: relax.Expr, call: Call) -> relax.Expr | None:
    """Return a transposed convolution of `x` as a convolution whose results are interleaved.

    None unless it is NCHW without groups or dilation, and has constant float32 weights.
    """
    attrs, weight = call.attrs, constant_of(call.args[1])
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "IOHW" and int(attrs.groups) == 1
    if weight is None or not plain or weight.dtype != np.float32 or any(int(d) != 1 for d in attrs.dilation):
        return None
    (sh, sw), (top, left, _, _) = (int(s) for s in attrs.strides), (int(p) for p in attrs.padding)
    n, _, height, width = shape_of(x)
    _, _, out_height, out_width = shape_of(call)
    kernel, outputs = _phases(weight, sh, sw), weight.shape[1]
    mh, mw = kernel.shape[2:]
    if sh * sw == 1:
        ahead = (mh - 1 - top, mw - 1 - left)
        padding = (*ahead, out_height - height + top, out_width - width + left)
        if min(padding) >= 0:
            return table.bb.emit(relax.op.nn.conv2d(x, relax.const(kernel), padding=padding))
    # Rows and columns after the last product, which an output padding may require.
    below = max(0, -(-(top + out_height) // sh) - (height + mh - 1))
    beside = max(0, -(-(left + out_width) // sw) - (width + mw - 1))
    padding = (mh - 1, mw - 1, mh - 1 + below, mw - 1 + beside)
    y = table.bb.emit(relax.op.nn.conv2d(x, relax.const(kernel), padding=padding))
    rows, columns = height + mh - 1 + below, width + mw - 1 + beside
    if sh * sw > 1:
        y = table.bb.emit(relax.op.reshape(y, (n, outputs, sh, sw, rows, columns)))
        y = table.bb.emit(relax.op.permute_dims(y, [0, 1, 4, 2, 5, 3]))
        y = table.bb.emit(relax.op.reshape(y, (n, outputs, rows * sh, columns * sw)))
    if (rows * sh, columns * sw) == (out_height, out_width):
        return y
    end = [top + out_height, left + out_width]
    return table.bb.emit(relax.op.strided_slice(y, [2, 3], [top, left], end))


def _phases(weight: np.ndarray, sh: int, sw: int) -> np.ndarray:
    """Return `[I, O, kh, kw]` as `[O * sh * sw, I, ceil(kh / sh), ceil(kw / sw)]`, windows reversed."""
    inputs, outputs, kh, kw = weight.shape
    mh, mw = -(-kh // sh), -(-kw // sw)
    whole = np.zeros((inputs, outputs, mh * sh, mw * sw), weight.dtype)
    whole[:, :, :kh, :kw] = weight
    split = whole.reshape(inputs, outputs, mh, sh, mw, sw)[:, :, ::-1, :, ::-1]
    return np.ascontiguousarray(split.transpose(1, 3, 5, 0, 2, 4).reshape(outputs * sh * sw, inputs, mh, mw))
