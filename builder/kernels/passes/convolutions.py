"""Rewrites convolutions of other kinds as two-dimensional ones, which have design spaces.

A one-dimensional convolution becomes one of images with a height of one. Element-wise operators between two
such convolutions become four-dimensional too, so that they are fused with them.

A transposed convolution of stride s becomes s*s convolutions of the input, one for each position inside a
stride, whose results are interleaved: no product with an inserted zero is computed (Shi et al., "Is the
deconvolution layer the same as a convolutional layer?", 2016).

A three-dimensional convolution becomes one of images: for each frame of the output, the frames that its
window covers are stacked as channels.

A depthwise convolution with several filters for each channel becomes as many depthwise convolutions, whose
results are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    if name in _IMAGES:
        image = _IMAGES[name](table, call)
        if image is not None:
            table.images[var] = table.bb.emit(image)
        return image is not None
    if name in _PLAIN:
        plain = _PLAIN[name](table, call)
        if plain is not None:
            table.define(var, plain)
        return plain is not None
    return False


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


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A transposed convolution of images, without its output padding.

    Attributes
    ----------
    strides, dilation
        Along rows and columns.
    padding
        Rows above and columns to the left that are cut off.
    groups
        Groups of channels.
    outputs
        Rows and columns of the output.
    """

    strides: tuple[int, int]
    dilation: tuple[int, int]
    padding: tuple[int, int]
    groups: int
    outputs: tuple[int, int]


def _transposed_2d(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a transposed convolution of images; None unless it is NCHW with constant float32 weights."""
    attrs, weight = call.attrs, constant_of(call.args[1])
    if (
        weight is None
        or weight.dtype != np.float32
        or attrs.data_layout != "NCHW"
        or attrs.kernel_layout != "IOHW"
    ):
        return None
    sh, sw = (int(s) for s in attrs.strides)
    dh, dw = (int(d) for d in attrs.dilation)
    top, left = (int(p) for p in list(attrs.padding)[:2])
    _, _, height, width = shape_of(call)
    op = _Transposed((sh, sw), (dh, dw), (top, left), int(attrs.groups), (height, width))
    return _transposed(table, table.plain(call.args[0]), weight, op)


def _transposed_1d(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a transposed convolution in one dimension as one of images; None as in `_transposed_2d`."""
    attrs, weight = call.attrs, constant_of(call.args[1])
    if (
        weight is None
        or weight.dtype != np.float32
        or attrs.data_layout != "NCW"
        or attrs.kernel_layout != "IOW"
    ):
        return None
    op = _Transposed(
        (1, int(attrs.strides[0])),
        (1, int(attrs.dilation[0])),
        (0, int(attrs.padding[0])),
        int(attrs.groups),
        (1, shape_of(call)[2]),
    )
    return _transposed(table, table.as_image(call.args[0]), np.expand_dims(weight, 2), op)


def _transposed(table: _FourDimensional, x: relax.Expr, weight: np.ndarray, op: _Transposed) -> relax.Expr:
    """Return a transposed convolution of `x` as a convolution whose results are interleaved.

    Parameters
    ----------
    table
        Receives the operators.
    x
        The images, `[N, I, H, W]`.
    weight
        `[I, O / groups, KH, KW]`, float32.
    op
        The geometry.
    """
    (sh, sw), (top, left), (out_height, out_width) = op.strides, op.padding, op.outputs
    n, _, height, width = shape_of(x)
    kernel = _phases(_spread(weight, op.dilation), sh, sw, op.groups)
    outputs = kernel.shape[0] // (sh * sw)
    mh, mw = kernel.shape[2:]
    if sh * sw == 1:
        ahead = (mh - 1 - top, mw - 1 - left)
        padding = (*ahead, out_height - height + top, out_width - width + left)
        if min(padding) >= 0:
            return table.bb.emit(_convolution(table, x, kernel, padding, op.groups))
    # Rows and columns after the last product, which an output padding may require.
    below = max(0, -(-(top + out_height) // sh) - (height + mh - 1))
    beside = max(0, -(-(left + out_width) // sw) - (width + mw - 1))
    padding = (mh - 1, mw - 1, mh - 1 + below, mw - 1 + beside)
    y = table.bb.emit(_convolution(table, x, kernel, padding, op.groups))
    rows, columns = height + mh - 1 + below, width + mw - 1 + beside
    if sh * sw > 1:
        y = table.bb.emit(relax.op.reshape(y, (n, outputs, sh, sw, rows, columns)))
        y = table.bb.emit(relax.op.permute_dims(y, [0, 1, 4, 2, 5, 3]))
        y = table.bb.emit(relax.op.reshape(y, (n, outputs, rows * sh, columns * sw)))
    if (rows * sh, columns * sw) == (out_height, out_width):
        return y
    end = [top + out_height, left + out_width]
    return table.bb.emit(relax.op.strided_slice(y, [2, 3], [top, left], end))


def _spread(weight: np.ndarray, dilation: tuple[int, int]) -> np.ndarray:
    """Return `[I, O, kh, kw]` with the zeros of its dilation written out."""
    if dilation == (1, 1):
        return weight
    *lead, kh, kw = weight.shape
    dh, dw = dilation
    whole = np.zeros((*lead, (kh - 1) * dh + 1, (kw - 1) * dw + 1), weight.dtype)
    whole[..., ::dh, ::dw] = weight
    return whole


def _convolution(
    table: _FourDimensional, x: relax.Expr, weight: np.ndarray, padding: tuple[int, ...], groups: int
) -> relax.Expr:
    """Return a convolution of stride 1 whose weights are `[O, I / groups, KH, KW]`."""
    filters = weight.shape[0] // groups if groups == shape_of(x)[1] else 1
    if groups > 1 and filters > 1:
        parts = [
            relax.op.nn.conv2d(x, relax.const(_every(weight, k, filters)), padding=padding, groups=groups)
            for k in range(filters)
        ]
        return _interleaved(table, parts)
    return relax.op.nn.conv2d(x, relax.const(weight), padding=padding, groups=groups)


def _several_filters(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a depthwise convolution with several filters for each channel as as many depthwise ones.

    None for any other convolution.
    """
    attrs, weight = call.attrs, constant_of(call.args[1])
    channels = shape_of(call.args[0])[1] if attrs.data_layout == "NCHW" else 0
    if weight is None or attrs.kernel_layout != "OIHW" or weight.dtype != np.float32:
        return None
    filters = weight.shape[0] // max(channels, 1)
    if int(attrs.groups) != channels or channels < 2 or filters < 2:
        return None
    x = table.plain(call.args[0])
    weights = [relax.const(_every(weight, k, filters)) for k in range(filters)]
    return _interleaved(table, [Call(call.op, [x, w], attrs) for w in weights])


def _every(weight: np.ndarray, first: int, step: int) -> np.ndarray:
    """Return every `step`th filter of `weight`, from the filter `first` on."""
    return np.ascontiguousarray(weight[first::step])


def _interleaved(table: _FourDimensional, parts: list[relax.Expr]) -> relax.Expr:
    """Return `[N, C * len(parts), H, W]` whose channels are taken from each part in turn."""
    bb = table.bb
    frames = [bb.emit(relax.op.expand_dims(bb.emit(part), 2)) for part in parts]
    together = bb.emit(relax.op.concat(frames, 2))
    n, channels, count, height, width = shape_of(together)
    return bb.emit(relax.op.reshape(together, (n, channels * count, height, width)))


def _three_dimensions(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a three-dimensional convolution as one of images; None unless NCDHW with constant weights."""
    attrs, weight = call.attrs, constant_of(call.args[1])
    if (
        weight is None
        or weight.dtype != np.float32
        or attrs.data_layout != "NCDHW"
        or attrs.kernel_layout != "OIDHW"
    ):
        return None
    strides, dilation = ([int(v) for v in values] for values in (attrs.strides, attrs.dilation))
    padding = [int(p) for p in attrs.padding]
    front, top, left, back, bottom, right = padding * (6 // len(padding))
    groups = int(attrs.groups)
    n, _, depth, height, width = shape_of(call.args[0])
    outputs, per_group, taps, kh, kw = weight.shape
    frames = shape_of(call)[2]
    bb = table.bb
    x = bb.emit(relax.op.reshape(table.plain(call.args[0]), (n, groups, per_group, depth, height, width)))
    x = bb.emit(relax.op.permute_dims(x, [0, 3, 1, 2, 4, 5]))
    if front or back:
        x = bb.emit(relax.op.nn.pad(x, [0, 0, front, back] + [0] * 8))
    covered = [
        bb.emit(
            relax.op.strided_slice(
                x, [1], [tap * dilation[0]], [tap * dilation[0] + (frames - 1) * strides[0] + 1], [strides[0]]
            )
        )
        for tap in range(taps)
    ]
    stacked = covered[0] if taps == 1 else bb.emit(relax.op.concat(covered, 3))
    images = bb.emit(relax.op.reshape(stacked, (n * frames, groups * taps * per_group, height, width)))
    kernel = weight.transpose(0, 2, 1, 3, 4).reshape(outputs, taps * per_group, kh, kw)
    y = bb.emit(
        relax.op.nn.conv2d(
            images,
            relax.const(np.ascontiguousarray(kernel)),
            strides=strides[1:],
            padding=(top, left, bottom, right),
            dilation=dilation[1:],
            groups=groups,
        )
    )
    _, _, _, out_height, out_width = shape_of(call)
    y = bb.emit(relax.op.reshape(y, (n, frames, outputs, out_height, out_width)))
    return bb.emit(relax.op.permute_dims(y, [0, 2, 1, 3, 4]))


def _phases(weight: np.ndarray, sh: int, sw: int, groups: int) -> np.ndarray:
    """Return `[I, O / g, kh, kw]` as `[O * sh * sw, I / g, ceil(kh / sh), ceil(kw / sw)]`, all reversed."""
    inputs, outputs, kh, kw = weight.shape
    mh, mw = -(-kh // sh), -(-kw // sw)
    whole = np.zeros((inputs, outputs, mh * sh, mw * sw), weight.dtype)
    whole[:, :, :kh, :kw] = weight
    split = whole.reshape(groups, inputs // groups, outputs, mh, sh, mw, sw)[:, :, :, ::-1, :, ::-1]
    split = split.transpose(0, 2, 4, 6, 1, 3, 5)
    return np.ascontiguousarray(split.reshape(groups * outputs * sh * sw, inputs // groups, mh, mw))


# Operators that become ones of images `[N, C, 1, W]`, and those that keep their shape.
_IMAGES: Final = {
    "relax.nn.conv1d": _one_dimension,
    "relax.nn.conv1d_transpose": _transposed_1d,
    **dict.fromkeys(_UNARY | _BINARY, _between),
}
_PLAIN: Final = {
    "relax.nn.conv2d": _several_filters,
    "relax.nn.conv2d_transpose": _transposed_2d,
    "relax.nn.conv3d": _three_dimensions,
}
