"""Rewrites convolutions of other kinds as two-dimensional ones, which have design spaces.

A one-dimensional convolution becomes one of images with one row, and so does pooling in one dimension.
A three-dimensional convolution becomes one of images too: for each frame of the output, the frames that its
window covers are stacked as channels. If each channel has a filter of its own, the results for these frames
are added instead.

What stands between two such convolutions becomes four-dimensional too (`images`), so that it is fused with
them or at least keeps channels packed: element-wise operators, slices, padding, concatenations, reductions.

A transposed convolution of stride s becomes s*s convolutions of the input (s*s*s in three dimensions), one
for each position inside a stride, whose results are interleaved: no product with an inserted zero is computed
(Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016).

A depthwise convolution with several filters for each channel becomes as many depthwise convolutions, whose
results are interleaved.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.images import (
    AXES,
    IMAGE,
    SIGNAL,
    VIDEO,
    Images,
    cut_frames,
    from_frames,
    pad_frames,
    to_frames,
)
from builder.kernels.rewriter import (
    RESHAPES,
    constant_of,
    integers_of,
    op_name,
    rewrite_main,
    shape_of,
)

_UNARY: Final = {
    f"relax.{n}"
    for n in (
        "nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "tanh", "sigmoid",
        "erf", "exp", "abs", "negative", "sqrt", "square", "clip", "astype",
    )
}  # fmt: skip
# Operators of one tensor; the others are its scale and zero point.
_OF_ONE: Final = {"relax.quantize", "relax.dequantize"}
_LOWEST: Final = -3.4028234663852886e38  # float32's most negative finite number: the identity of a maximum
_BINARY: Final = {
    f"relax.{n}" for n in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power")
}


def to_conv2d(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the one-dimensional and the transposed convolutions of `mod`.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    """
    t = relax.transform
    passes = [t.Normalize(), t.ConvertToDataflow(min_size=1), t.CanonicalizeBindings()]
    return rewrite_main(tvm.transform.Sequential(passes)(mod), _emit, Images)


def _emit(table: Images, var: relax.Var, call: Call) -> bool:
    name = op_name(call)
    if name in RESHAPES and call.args[0] in table.images and shape_of(call) == shape_of(call.args[0]):
        table.images[var] = table.images[call.args[0]]
        return True
    if name in _REDUCTIONS:
        return _reduction(table, var, call)
    if name == "relax.nn.conv3d":
        return _three_dimensions(table, var, call)
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


def _pooled(table: Images, call: Call) -> relax.Expr | None:
    """Return a pooling in one dimension as one of images; None unless it is NCW."""
    attrs = call.attrs
    if attrs.layout != "NCW" or attrs.out_layout != "NCW":
        return None
    padding = [int(p) for p in attrs.padding]
    left, right = padding if len(padding) > 1 else padding * 2
    pool = relax.op.nn.max_pool2d if op_name(call) == "relax.nn.max_pool1d" else relax.op.nn.avg_pool2d
    return pool(
        table.as_image(call.args[0], SIGNAL),
        pool_size=(1, int(attrs.pool_size[0])),
        strides=(1, int(attrs.strides[0])),
        padding=(0, left, 0, right),
        dilation=(1, int(attrs.dilation[0])),
        ceil_mode=bool(attrs.ceil_mode),
        count_include_pad=bool(attrs.count_include_pad),
    )


def _pooled_video(table: Images, call: Call) -> relax.Expr | None:
    """Return a pooling of a single video as one of its frames, and of the results for adjacent frames.

    None for several videos, for padding that an average does not count, and for windows of frames that are
    dilated or not complete.
    """
    attrs, (n, _, depth, *_) = call.attrs, shape_of(call.args[0])
    padding = [int(p) for p in attrs.padding]
    front, top, left, back, bottom, right = padding * (6 // len(padding))
    taps, *window = (int(k) for k in attrs.pool_size)
    (step, *strides), (apart, *dilation) = ([int(v) for v in a] for a in (attrs.strides, attrs.dilation))
    is_max = op_name(call) == "relax.nn.max_pool3d"
    count = (depth + front + back - taps) // step + 1
    if attrs.layout != "NCDHW" or attrs.out_layout != "NCDHW" or n != 1 or str(call.ty.dtype) != "float32":
        return None
    is_plain = is_max or not any(padding) or (taps == 1 and front == back == 0)
    if not is_plain or apart != 1 or count != shape_of(call)[2]:
        return None
    bb = table.bb
    pool = relax.op.nn.max_pool2d if is_max else relax.op.nn.avg_pool2d
    pooled = bb.emit(
        pool(
            table.as_image(call.args[0], VIDEO),
            pool_size=window,
            strides=strides,
            padding=(top, left, bottom, right),
            dilation=dilation,
            ceil_mode=bool(attrs.ceil_mode),
            count_include_pad=bool(attrs.count_include_pad),
        )
    )
    pooled = pad_frames(bb, pooled, 1, (front, back), _LOWEST)
    last = (count - 1) * step + 1
    frames = [cut_frames(bb, pooled, 1, slice(tap, tap + last, step)) for tap in range(taps)]
    join = relax.op.maximum if is_max else relax.op.add
    result = functools.reduce(lambda a, b: bb.emit(join(a, b)), frames)
    return result if is_max or taps == 1 else relax.op.multiply(result, relax.const(1 / taps, "float32"))


def _moved(table: Images, call: Call) -> relax.Expr | None:
    """Return a slice, a padding or a concatenation in four dimensions; None if no operand is an image yet."""
    name, rank = op_name(call), len(shape_of(call))
    parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else [call.args[0]]
    if not any(_is_image(table, part, rank) for part in parts):
        return None
    places = AXES[rank]
    if name == "relax.concat":
        axis = places[int(call.attrs.axis) % rank]
        if axis is None or not all(rank == SIGNAL or shape_of(part)[0] == 1 for part in parts):
            return None
        return relax.op.concat([table.as_image(part, rank) for part in parts], axis)
    image = table.as_image(parts[0], rank)
    if name == "relax.nn.pad":
        widths, around = [int(width) for width in call.attrs.pad_width], [0] * (2 * IMAGE)
        for axis, place in enumerate(places):
            pair = widths[2 * axis : 2 * axis + 2]
            if place is None and any(pair):
                return None
            if place is not None:
                around[2 * place : 2 * place + 2] = pair
        return relax.op.nn.pad(image, around, str(call.attrs.pad_mode), float(call.attrs.pad_value))
    axes, *others = (integers_of(argument) for argument in call.args[1:])
    cut = [places[axis % rank] for axis in axes]
    if not cut or None in cut or not all(others):
        return None
    return relax.op.strided_slice(image, cut, *others)


def _slopes(table: Images, call: Call) -> relax.Expr | None:
    """Return a PReLU in four dimensions; None if its operand is no image yet, or columns have slopes."""
    rank = len(shape_of(call))
    of_channels = int(call.attrs.axis) % rank == 1 or shape_of(call.args[1]) == (1,)
    if not _is_image(table, call.args[0], rank) or not of_channels:
        return None
    return relax.op.nn.prelu(table.images[call.args[0]], table.plain(call.args[1]), 1)


def _reduction(table: Images, var: relax.Var, call: Call) -> bool:
    """Replace a reduction of an image: over its columns, its rows and columns, its channels, or a video."""
    x, rank = call.args[0], len(shape_of(call.args[0]))
    if not _is_image(table, x, rank) or call.attrs.axis is None:
        return False
    axes = {int(axis) % rank for axis in call.attrs.axis}
    image = _reduced(table, op_name(call), table.images[x], rank, axes)
    if image is None:
        return False
    if call.attrs.keepdims:
        table.images[var] = image
    else:
        table.define(var, table.bb.emit(relax.op.reshape(image, shape_of(call))))
    return True


def _reduced(table: Images, name: str, image: relax.Expr, rank: int, axes: Set[int]) -> relax.Expr | None:
    """Return a reduction over axes of a signal or a video, whose axes stay; None over other axes."""
    bb, operator = table.bb, _REDUCTIONS[name]
    if rank == SIGNAL and 0 not in axes:
        wide = [1] * (1 in axes) + [2, 3] * (2 in axes)
        return bb.emit(operator(image, wide, keepdims=True))
    if rank != VIDEO or axes not in ({1}, {3, 4}, {2, 3, 4}):
        return None
    if 2 not in axes:
        return bb.emit(operator(image, [AXES[VIDEO][axis] for axis in sorted(axes)], keepdims=True))
    if name == "relax.variance":
        mean = _reduced(table, "relax.mean", image, rank, axes)
        difference = bb.emit(relax.op.subtract(image, mean))
        return _reduced(table, "relax.mean", bb.emit(relax.op.square(difference)), rank, axes)
    frames = bb.emit(operator(image, [2, 3], keepdims=True))
    return bb.emit(operator(frames, [0], keepdims=True))


def _one_dimension(table: Images, call: Call) -> relax.Expr | None:
    """Return a one-dimensional convolution as a two-dimensional one.

    None unless it is NCW, and of float32 or of bytes with int32 sums.
    """
    attrs, dtype = call.attrs, str(call.ty.dtype)
    if attrs.data_layout != "NCW" or attrs.kernel_layout != "OIW" or dtype not in ("float32", "int32"):
        return None
    padding = [int(p) for p in attrs.padding]
    left, right = padding if len(padding) > 1 else padding * 2
    return relax.op.nn.conv2d(
        table.as_image(call.args[0], SIGNAL),
        table.as_image(call.args[1], SIGNAL),
        strides=(1, int(attrs.strides[0])),
        padding=(0, left, 0, right),
        dilation=(1, int(attrs.dilation[0])),
        groups=int(attrs.groups),
        out_dtype=None if dtype == "float32" else dtype,
    )


def _between(table: Images, call: Call) -> relax.Expr | None:
    """Return an element-wise operator in four dimensions, None if no operand is four-dimensional yet."""
    shape = shape_of(call)
    if not any(_is_image(table, arg, len(shape)) for arg in call.args):
        return None
    args = []
    for arg in call.args[:1] if op_name(call) in _OF_ONE else call.args:
        rank = len(shape_of(arg)) if isinstance(arg.ty, relax.TensorType) else 0
        if rank and not table.fits(arg, shape):
            return None
        args.append(table.as_image(arg, len(shape)) if rank else table.plain(arg))
    if len(args) < len(call.args):
        if any(np.prod(shape_of(arg)) != 1 for arg in call.args[1:]):
            return None  # a scale for each channel
        args += map(table.plain, call.args[1:])
    return Call(call.op, args, call.attrs)


def _is_image(table: Images, expr: relax.Expr, rank: int) -> bool:
    """Whether a signal or a video, by its rank, is an image already."""
    return isinstance(expr, relax.Var) and expr in table.images and len(shape_of(expr)) == rank


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


def _transposed_plain(table: Images, call: Call) -> relax.Expr | None:
    """Return a transposed convolution of images, or in three dimensions, as `_transposed` does.

    None unless its layouts are ONNX's and its weights constant float32.
    """
    images = len(shape_of(call)) == IMAGE
    weight = _weight_of(call, *(("NCHW", "IOHW") if images else ("NCDHW", "IODHW")))
    if weight is None:
        return None
    return _transposed(table, table.plain(call.args[0]), weight, _Transposed.of(call))


def _transposed_1d(table: Images, call: Call) -> relax.Expr | None:
    """Return a transposed convolution in one dimension as one of images; None as in `_transposed_plain`."""
    weight = _weight_of(call, "NCW", "IOW")
    if weight is None:
        return None
    op = _Transposed.of(call)
    flat = _Transposed((1, *op.strides), (1, *op.dilation), (0, *op.padding), op.groups, (1, *op.outputs))
    return _transposed(table, table.as_image(call.args[0], SIGNAL), np.expand_dims(weight, 2), flat)


def _transposed(table: Images, x: relax.Expr, weight: np.ndarray, op: _Transposed) -> relax.Expr:
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
    table: Images, x: relax.Expr, weight: np.ndarray, padding: tuple[int, ...], groups: int
) -> relax.Expr:
    """Return a convolution of stride 1 whose weights are `[O, I / groups, ...]`.

    `padding` is what is added before each dimension, then what is added after each.
    """
    if len(shape_of(x)) == VIDEO:
        n = shape_of(x)[0]
        frames = table.bb.emit(to_frames(table.bb, x))
        y = _frames(table, frames, weight, _Spatial((1, 1, 1), (1, 1, 1), padding, groups), n)
        return from_frames(table.bb, y, n)
    filters = weight.shape[0] // groups if groups == shape_of(x)[1] else 1
    if groups > 1 and filters > 1:
        parts = [
            relax.op.nn.conv2d(x, relax.const(_every(weight, k, filters)), padding=padding, groups=groups)
            for k in range(filters)
        ]
        return _interleaved(table, parts)
    return relax.op.nn.conv2d(x, relax.const(weight), padding=padding, groups=groups)


def _several_filters(table: Images, call: Call) -> relax.Expr | None:
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


def _interleaved(table: Images, parts: list[relax.Expr]) -> relax.Expr:
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


def _three_dimensions(table: Images, var: relax.Var, call: Call) -> bool:
    """Replace a three-dimensional convolution by one of images, if it is NCDHW with constant weights."""
    weight, attrs = _weight_of(call, "NCDHW", "OIDHW"), call.attrs
    if weight is None:
        return False
    strides, dilation = (tuple(int(v) for v in values) for values in (attrs.strides, attrs.dilation))
    padding = tuple(int(p) for p in attrs.padding)
    op = _Spatial(strides, dilation, padding * (6 // len(padding)), int(attrs.groups))
    n = shape_of(call)[0]
    if n == 1:
        table.images[var] = _frames(table, table.as_image(call.args[0], VIDEO), weight, op, 1)
        return True
    x = table.bb.emit(to_frames(table.bb, table.plain(call.args[0])))
    table.define(var, table.bb.emit(from_frames(table.bb, _frames(table, x, weight, op, n), n)))
    return True


def _frames(table: Images, x: relax.Expr, weight: np.ndarray, op: _Spatial, n: int) -> relax.Expr:
    """Return a three-dimensional convolution of `n` videos, `[N * D, I, H, W]`, as one of images.

    The weights are `[O, I / groups, KD, KH, KW]`.
    """
    front, top, left, back, bottom, right = op.padding
    outputs, per_group, taps, kh, kw = weight.shape
    bb = table.bb
    x = pad_frames(bb, x, n, (front, back), 0.0)
    depth = shape_of(x)[0] // n
    count = (depth - (taps - 1) * op.dilation[0] - 1) // op.strides[0] + 1
    last = (count - 1) * op.strides[0] + 1
    begins = [tap * op.dilation[0] for tap in range(taps)]
    covered = [cut_frames(bb, x, n, slice(begin, begin + last, op.strides[0])) for begin in begins]

    def convolved(images: relax.Expr, kernel: np.ndarray) -> relax.Expr:
        return bb.emit(
            relax.op.nn.conv2d(
                images,
                relax.const(np.ascontiguousarray(kernel)),
                strides=op.strides[1:],
                padding=(top, left, bottom, right),
                dilation=op.dilation[1:],
                groups=op.groups,
            )
        )

    if per_group == 1 and op.groups > 1 and taps > 1:
        parts = [convolved(images, weight[:, :, tap]) for tap, images in enumerate(covered)]
        return functools.reduce(lambda a, b: bb.emit(relax.op.add(a, b)), parts)
    images = covered[0]
    if taps > 1:
        _, channels, height, width = shape_of(x)
        if op.groups == 1:
            images = bb.emit(relax.op.concat(covered, 1))
        else:
            split = (n * count, op.groups, per_group, height, width)
            stacked = bb.emit(relax.op.concat([bb.emit(relax.op.reshape(c, split)) for c in covered], 2))
            images = bb.emit(relax.op.reshape(stacked, (n * count, taps * channels, height, width)))
    return convolved(images, weight.transpose(0, 2, 1, 3, 4).reshape(outputs, taps * per_group, kh, kw))


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
    "relax.nn.max_pool1d": _pooled,
    "relax.nn.avg_pool1d": _pooled,
    "relax.nn.avg_pool3d": _pooled_video,
    "relax.nn.max_pool3d": _pooled_video,
    "relax.nn.prelu": _slopes,
    "relax.concat": _moved,
    "relax.nn.pad": _moved,
    "relax.strided_slice": _moved,
    **dict.fromkeys(_UNARY | _BINARY | _OF_ONE, _between),
}
_REDUCTIONS: Final = {
    "relax.max": relax.op.max,
    "relax.mean": relax.op.mean,
    "relax.min": relax.op.min,
    "relax.sum": relax.op.sum,
    "relax.variance": relax.op.variance,
}
_PLAIN: Final = {
    "relax.nn.conv2d": _several_filters,
    "relax.nn.conv2d_transpose": _transposed_plain,
    "relax.nn.conv3d_transpose": _transposed_plain,
}
