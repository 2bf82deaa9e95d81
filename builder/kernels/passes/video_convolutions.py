"""Three-dimensional convolutions as two-dimensional ones.

For each frame of the output, the frames that its window covers are stacked as channels of one image. If each
channel has a filter of its own, the results for these frames are added instead.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.images import VIDEO, Images, cut_frames, from_frames, pad_frames, to_frames
from builder.kernels.rewriter import constant_of, shape_of


@dataclass(frozen=True, slots=True)
class Spatial:
    """A convolution's geometry in three dimensions: of depth, rows and columns.

    `padding`: front, top, left, back, bottom, right.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int


def emit(table: Images, var: relax.Var, call: Call) -> bool:
    """Replace a three-dimensional convolution by one of images, if it is NCDHW with constant weights."""
    weight, attrs = weight_of(call, "NCDHW", "OIDHW"), call.attrs
    if weight is None:
        return False
    strides, dilation = (tuple(int(v) for v in values) for values in (attrs.strides, attrs.dilation))
    padding = tuple(int(p) for p in attrs.padding)
    op = Spatial(strides, dilation, padding * (6 // len(padding)), int(attrs.groups))
    n = shape_of(call)[0]
    if n == 1:
        table.images[var] = convolve_frames(table, table.as_image(call.args[0], VIDEO), weight, op, 1)
        return True
    x = table.bb.emit(to_frames(table.bb, table.plain(call.args[0])))
    table.define(var, table.bb.emit(from_frames(table.bb, convolve_frames(table, x, weight, op, n), n)))
    return True


def convolve_frames(table: Images, x: relax.Expr, weight: np.ndarray, op: Spatial, n: int) -> relax.Expr:
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


def weight_of(call: Call, data_layout: str, kernel_layout: str) -> np.ndarray | None:
    """Return the constant float32 weights of a convolution; None if they or its layouts are others."""
    weight, attrs = constant_of(call.args[1]), call.attrs
    if weight is None or weight.dtype != np.float32:
        return None
    return weight if (attrs.data_layout, attrs.kernel_layout) == (data_layout, kernel_layout) else None
