"""What stands between two convolutions that become two-dimensional, in four dimensions too.

So it is fused with them, or at least keeps channels packed: element-wise operators, pooling, slices, padding,
concatenations, reductions. An operator that is not one of images stays as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.images import AXES, IMAGE, SIGNAL, VIDEO, Images, cut_frames, pad_frames
from builder.kernels.rewriter import integers_of, op_name, shape_of

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
ELEMENTWISE: Final = _UNARY | _BINARY | _OF_ONE
_LOWEST: Final = -math.inf  # the identity of a maximum
REDUCTIONS: Final = {
    "relax.max": relax.op.max,
    "relax.mean": relax.op.mean,
    "relax.min": relax.op.min,
    "relax.sum": relax.op.sum,
    "relax.variance": relax.op.variance,
}


def pooled(table: Images, call: Call) -> relax.Expr | None:
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


def pooled_video(table: Images, call: Call) -> relax.Expr | None:
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


def moved(table: Images, call: Call) -> relax.Expr | None:
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


def slopes(table: Images, call: Call) -> relax.Expr | None:
    """Return a PReLU in four dimensions; None if its operand is no image yet, or columns have slopes."""
    rank = len(shape_of(call))
    of_channels = int(call.attrs.axis) % rank == 1 or shape_of(call.args[1]) == (1,)
    if not _is_image(table, call.args[0], rank) or not of_channels:
        return None
    return relax.op.nn.prelu(table.images[call.args[0]], table.plain(call.args[1]), 1)


def reduction(table: Images, var: relax.Var, call: Call) -> bool:
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
    bb, operator = table.bb, REDUCTIONS[name]
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


def elementwise(table: Images, call: Call) -> relax.Expr | None:
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
