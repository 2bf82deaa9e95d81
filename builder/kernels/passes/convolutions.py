"""Rewrites convolutions of other kinds as two-dimensional ones, which have design spaces.

A one-dimensional convolution becomes one of images with a height of one. Element-wise operators between two
such convolutions become four-dimensional too, so that they are fused with them.

A transposed convolution of stride s becomes s*s convolutions of the input (s*s*s in three dimensions), one
for each position inside a stride, whose results are interleaved: no product with an inserted zero is computed
(Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016).

A three-dimensional convolution becomes one of images: for each frame of the output, the frames that its
window covers are stacked as channels.

A depthwise convolution with several filters for each channel becomes as many depthwise convolutions, whose
results are interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import RESHAPES, Values, constant_of, op_name, rewrite_main, shape_of

_RANK, _IMAGE_RANK = 3, 4  # of the input of a convolution in one dimension, and of one of images
_UNARY: Final = {
    f"relax.{n}"
    for n in (
        "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "tanh", "sigmoid",
        "erf", "exp", "abs", "negative", "sqrt", "square", "clip", "astype",
    )
}  # fmt: skip
# Operators of one tensor; the others are its scale and zero point.
_OF_ONE: Final = {"relax.quantize", "relax.dequantize"}
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
        """Return `expr`, `[N, C, W]` or what broadcasts to it, as `[N, C, 1, W]`."""
        if isinstance(expr, relax.Var) and expr in self.images:
            return self.images[expr]
        *before, width = (1,) * (_RANK - len(shape_of(expr))) + shape_of(expr)
        numbers = constant_of(expr)
        if numbers is not None:
            return relax.const(numbers.reshape(*before, 1, width), str(numbers.dtype))
        new = self.bb.emit(relax.op.reshape(self.plain(expr), (*before, 1, width)))
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
    if name in RESHAPES and call.args[0] in table.images and shape_of(call) == shape_of(call.args[0]):
        table.images[var] = table.images[call.args[0]]
        return True
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
    """Return a one-dimensional convolution as a two-dimensional one.

    None unless it is NCW, and of float32 or of bytes with int32 sums.
    """
    attrs, dtype = call.attrs, str(call.ty.dtype)
    if attrs.data_layout != "NCW" or attrs.kernel_layout != "OIW" or dtype not in ("float32", "int32"):
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
        out_dtype=None if dtype == "float32" else dtype,
    )


def _between(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return an element-wise operator in four dimensions, None if no operand is four-dimensional yet."""
    tensors = [a for a in call.args if isinstance(a, relax.Var)]
    if not any(v in table.images for v in tensors) or len(shape_of(call)) != _RANK:
        return None
    args = []
    for arg in call.args[:1] if op_name(call) in _OF_ONE else call.args:
        rank = len(shape_of(arg)) if isinstance(arg.ty, relax.TensorType) else 0
        args.append(table.as_image(arg) if rank else table.plain(arg))
    if len(args) < len(call.args):
        if any(np.prod(shape_of(arg)) != 1 for arg in call.args[1:]):
            return None  # a scale for each channel
        args += map(table.plain, call.args[1:])
    return Call(call.op, args, call.attrs)


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A transposed convolution in two or three dimensions, without its output padding.

    Attributes
    ----------
    strides, dilation
        Along each dimension.
    padding
        What is cut off before each dimension: rows above, columns to the left.
    groups
        Groups of channels.
    outputs
        Extents of the output.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, call: Call) -> _Transposed:
        """Return the geometry of a Relax call whose layouts are those of ONNX."""
        attrs, outputs = call.attrs, tuple(shape_of(call)[2:])
        strides, dilation = (tuple(int(v) for v in values) for values in (attrs.strides, attrs.dilation))
        padding = tuple(int(p) for p in list(attrs.padding)[: len(outputs)])
        return cls(strides, dilation, padding, int(attrs.groups), outputs)


def _weight_of(call: Call, data_layout: str, kernel_layout: str) -> np.ndarray | None:
    """Return the constant float32 weights of a convolution; None if they or its layouts are others."""
    weight, attrs = constant_of(call.args[1]), call.attrs
    if weight is None or weight.dtype != np.float32:
        return None
    return weight if (attrs.data_layout, attrs.kernel_layout) == (data_layout, kernel_layout) else None


def _transposed_plain(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a transposed convolution of images, or in three dimensions, as `_transposed` does.

    None unless its layouts are ONNX's and its weights constant float32.
    """
    images = len(shape_of(call)) == _IMAGE_RANK
    weight = _weight_of(call, *(("NCHW", "IOHW") if images else ("NCDHW", "IODHW")))
    if weight is None:
        return None
    return _transposed(table, table.plain(call.args[0]), weight, _Transposed.of(call))


def _transposed_1d(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a transposed convolution in one dimension as one of images; None as in `_transposed_plain`."""
    weight = _weight_of(call, "NCW", "IOW")
    if weight is None:
        return None
    op = _Transposed.of(call)
    flat = _Transposed((1, *op.strides), (1, *op.dilation), (0, *op.padding), op.groups, (1, *op.outputs))
    return _transposed(table, table.as_image(call.args[0]), np.expand_dims(weight, 2), flat)


def _transposed(table: _FourDimensional, x: relax.Expr, weight: np.ndarray, op: _Transposed) -> relax.Expr:
    """Return a transposed convolution of `x` as a convolution whose results are interleaved.

    Parameters
    ----------
    table
        Receives the operators.
    x
        The input, `[N, I, H, W]` or `[N, I, D, H, W]`.
    weight
        `[I, O / groups, KH, KW]` or `[I, O / groups, KD, KH, KW]`, float32.
    op
        The geometry.
    """
    bb = table.bb
    n, _, *extents = shape_of(x)
    kernel = _phases(_spread(weight, op.dilation), op.strides, op.groups)
    count, rank = prod(op.strides), len(extents)
    outputs, taps = kernel.shape[0] // count, kernel.shape[2:]
    cut, ends = op.padding, [p + e for p, e in zip(op.padding, op.outputs, strict=True)]
    full = [e + m - 1 for e, m in zip(extents, taps, strict=True)]
    before = [m - 1 for m in taps]
    if count == 1:
        inside = [b - p for b, p in zip(before, cut, strict=True)]
        after = [end - e for end, e in zip(ends, extents, strict=True)]
        if min(*inside, *after) >= 0:
            return bb.emit(_convolution(table, x, kernel, (*inside, *after), op.groups))
    # Positions after the last product, which an output padding may require.
    more = [max(0, -(-end // s) - f) for end, s, f in zip(ends, op.strides, full, strict=True)]
    after = [b + m for b, m in zip(before, more, strict=True)]
    y = bb.emit(_convolution(table, x, kernel, (*before, *after), op.groups))
    sizes = [f + m for f, m in zip(full, more, strict=True)]
    whole = [size * s for size, s in zip(sizes, op.strides, strict=True)]
    if count > 1:
        first = 1 if op.groups == 1 else 2  # of the axes of phases
        channels = (*op.strides, outputs) if op.groups == 1 else (outputs, *op.strides)
        y = bb.emit(relax.op.reshape(y, (n, *channels, *sizes)))
        positions = [axis for a in range(rank) for axis in (2 + rank + a, first + a)]
        y = bb.emit(relax.op.permute_dims(y, [0, 1 + rank if op.groups == 1 else 1, *positions]))
        y = bb.emit(relax.op.reshape(y, (n, outputs, *whole)))
    if tuple(whole) == op.outputs:
        return y
    return bb.emit(relax.op.strided_slice(y, list(range(2, 2 + rank)), list(cut), ends))


def _spread(weight: np.ndarray, dilation: tuple[int, ...]) -> np.ndarray:
    """Return `[I, O, ...]` with the zeros of its dilation written out."""
    if set(dilation) == {1}:
        return weight
    extents = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    whole = np.zeros((*weight.shape[:2], *extents), weight.dtype)
    whole[(slice(None), slice(None), *(slice(None, None, d) for d in dilation))] = weight
    return whole


def _convolution(
    table: _FourDimensional, x: relax.Expr, weight: np.ndarray, padding: tuple[int, ...], groups: int
) -> relax.Expr:
    """Return a convolution of stride 1 whose weights are `[O, I / groups, ...]`.

    `padding` is what is added before each dimension, then what is added after each.
    """
    if len(shape_of(x)) > _IMAGE_RANK:
        return _frames(table, x, weight, _Spatial((1, 1, 1), (1, 1, 1), padding, groups))
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


@dataclass(frozen=True, slots=True)
class _Spatial:
    """A convolution's geometry in three dimensions: of depth, rows and columns.

    Attributes
    ----------
    strides, dilation
        Along each dimension.
    padding
        Front, top, left, back, bottom, right.
    groups
        Groups of channels.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int


def _three_dimensions(table: _FourDimensional, call: Call) -> relax.Expr | None:
    """Return a three-dimensional convolution as one of images; None unless NCDHW with constant weights."""
    weight, attrs = _weight_of(call, "NCDHW", "OIDHW"), call.attrs
    if weight is None:
        return None
    strides, dilation = (tuple(int(v) for v in values) for values in (attrs.strides, attrs.dilation))
    padding = tuple(int(p) for p in attrs.padding)
    op = _Spatial(strides, dilation, padding * (6 // len(padding)), int(attrs.groups))
    return _frames(table, table.plain(call.args[0]), weight, op)


def _frames(table: _FourDimensional, x: relax.Expr, weight: np.ndarray, op: _Spatial) -> relax.Expr:
    """Return a convolution of `x`, `[N, I, D, H, W]`, with `[O, I / groups, KD, KH, KW]` as one of images."""
    front, top, left, back, bottom, right = op.padding
    n, _, depth, height, width = shape_of(x)
    outputs, per_group, taps, kh, kw = weight.shape
    frames = (depth + front + back - (taps - 1) * op.dilation[0] - 1) // op.strides[0] + 1
    bb = table.bb
    x = bb.emit(relax.op.reshape(x, (n, op.groups, per_group, depth, height, width)))
    x = bb.emit(relax.op.permute_dims(x, [0, 3, 1, 2, 4, 5]))
    if front or back:
        x = bb.emit(relax.op.nn.pad(x, [0, 0, front, back] + [0] * 8))
    last = (frames - 1) * op.strides[0] + 1
    begins = [tap * op.dilation[0] for tap in range(taps)]
    covered = [
        bb.emit(relax.op.strided_slice(x, [1], [begin], [begin + last], [op.strides[0]])) for begin in begins
    ]
    stacked = covered[0] if taps == 1 else bb.emit(relax.op.concat(covered, 3))
    images = bb.emit(relax.op.reshape(stacked, (n * frames, op.groups * taps * per_group, height, width)))
    kernel = weight.transpose(0, 2, 1, 3, 4).reshape(outputs, taps * per_group, kh, kw)
    y = bb.emit(
        relax.op.nn.conv2d(
            images,
            relax.const(np.ascontiguousarray(kernel)),
            strides=op.strides[1:],
            padding=(top, left, bottom, right),
            dilation=op.dilation[1:],
            groups=op.groups,
        )
    )
    _, _, out_height, out_width = shape_of(y)
    y = bb.emit(relax.op.reshape(y, (n, frames, outputs, out_height, out_width)))
    return bb.emit(relax.op.permute_dims(y, [0, 2, 1, 3, 4]))


def _phases(weight: np.ndarray, strides: tuple[int, ...], groups: int) -> np.ndarray:
    """Return a kernel for each position inside a stride, as the kernel of one convolution.

    Parameters
    ----------
    weight
        `[I, O / groups, k, ...]`.
    strides
        `s` of each dimension.
    groups
        Groups of channels.

    Returns
    -------
    numpy.ndarray
        `[O * prod(s), I / groups, ceil(k / s), ...]`, reversed along each dimension. With groups, the
        positions of an output channel are adjacent; else the channels of a position, which stay packed.
    """
    inputs, outputs, *kernel = weight.shape
    taps = [-(-k // s) for k, s in zip(kernel, strides, strict=True)]
    pairs = list(zip(taps, strides, strict=True))
    whole = np.zeros((inputs, outputs, *(m * s for m, s in pairs)), weight.dtype)
    whole[(slice(None), slice(None), *(slice(k) for k in kernel))] = weight
    split = whole.reshape(groups, inputs // groups, outputs, *(extent for pair in pairs for extent in pair))
    split = np.flip(split, tuple(3 + 2 * a for a in range(len(pairs))))
    positions, steps = ([3 + 2 * a + part for a in range(len(pairs))] for part in (1, 0))
    split = split.transpose(*((0, 2, *positions) if groups > 1 else (0, *positions, 2)), 1, *steps)
    return np.ascontiguousarray(split.reshape(-1, inputs // groups, *taps))


# Operators that become ones of images `[N, C, 1, W]`, and those that keep their shape.
_IMAGES: Final = {
    "relax.nn.conv1d": _one_dimension,
    "relax.nn.conv1d_transpose": _transposed_1d,
    **dict.fromkeys(_UNARY | _BINARY | _OF_ONE, _between),
}
_PLAIN: Final = {
    "relax.nn.conv2d": _several_filters,
    "relax.nn.conv2d_transpose": _transposed_plain,
    "relax.nn.conv3d": _three_dimensions,
    "relax.nn.conv3d_transpose": _transposed_plain,
}
