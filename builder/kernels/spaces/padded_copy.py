"""Copies of packed channels: padded for a convolution, or only the pixels that it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tvm import s_tir as st
from tvm import te, tirx
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.loops import extent_of

# Columns of an image that are copied together: one vector, or several of the narrower ones.
_COPIED: Final = 16
# Counted on a Cortex-A72: a vector takes three instructions to copy.
_FEWEST_PANELS: Final = 6


def pad(x: te.Tensor, op: Conv2d, value: tirx.Expr | None = None, dtype: str | None = None) -> te.Tensor:
    """Return packed `x` with the convolution's padding; `x` itself if there is nothing to do.

    `x`: `[N, C/b, H, W, b]`.
    `value`: what is put around `x`, of the result's dtype; None for zeros.
    `dtype`: the result's; None for that of `x`.
    """
    top, left, bottom, right = op.padding
    kind = dtype or str(x.dtype)
    if not any(op.padding) and kind == str(x.dtype):
        return x
    n, c, h, w, b = (int(d) for d in x.shape)
    around = tirx.const(0, kind) if value is None else value

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        number = x[i, o, y - top, z - left, v].astype(kind)
        if not any(op.padding):
            return number
        inside = tirx.all(y >= top, y < h + top, z >= left, z < w + left)
        return tirx.if_then_else(inside, number, around)

    return te.compute((n, c, h + top + bottom, w + left + right, b), element, name="pad")


def read_pixels(x: te.Tensor, op: Conv2d, dtype: str | None = None) -> tuple[te.Tensor, Conv2d]:
    """Return the pixels of packed `x` that windows of one element read, and the convolution of them.

    Every second pixel is in every line of cache, but only half of a line is read, again for each panel of
    weights. Side by side, ARM also loads two of them with one instruction.

    `x`: `[N, C/b, H, W, b]`.
    `op`: the geometry: a window of one element, without padding.
    `dtype`: the result's; None for that of `x`.
    `x`, `op`: the pixels, `[N, C/b, OH, OW, b]`, and the geometry at stride 1.
    """
    n, c, _, _, b = (int(d) for d in x.shape)
    (sh, sw), kind = op.strides, dtype or str(x.dtype)
    shape = (n, c, op.out_height, op.out_width, b)
    pixels = te.compute(shape, lambda i, o, y, z, v: x[i, o, y * sh, z * sw, v].astype(kind), name="pixels")
    return pixels, replace(op, in_height=op.out_height, in_width=op.out_width, strides=(1, 1))


def worth_reading_once(op: Conv2d, panels: int) -> bool:
    """Whether `read_pixels` takes less time than it saves, if `panels` of weights read each pixel.

    It loads and stores each vector, and every panel saves half of a load, and half of the lines of cache.
    """
    plain = op.kernel == (1, 1) and not any(op.padding)
    return plain and op.strides[1] > 1 and panels >= _FEWEST_PANELS


def schedule_pad(sch: st.Schedule, block: SBlockRV) -> None:
    """Order the loops of the padded copy: rows are divided among cores, a block of channels is a vector.

    If a block is a single channel, a row is filled with zeros, and then copied into as vectors of columns.
    """
    loops = sch.get_loops(block)
    if len(loops) != 5:
        return
    *rows, columns, channels = loops
    if extent_of(sch, channels) > 1:
        sch.vectorize(channels)
        sch.parallel(sch.fuse(*rows))
        return
    sch.parallel(sch.fuse(*rows))
    if int(sch.get(block).reads[0].source.shape[3]) == 1:
        return  # a copy of one column is no loop, which TVM's primitive expects
    zeros = sch.decompose_padding(block, columns)
    for part in (zeros, block):
        *_, columns, _ = sch.get_loops(part)
        sch.vectorize(sch.split(columns, [None, _COPIED])[1])
