"""The copy of packed channels that has the padding of a convolution around it."""

from __future__ import annotations

from typing import Final

from tvm import s_tir as st
from tvm import te, tirx

from builder.kernels.spaces.geometry import Conv2d

# Columns of an image that are copied together: one vector, or several of the narrower ones.
_COPIED: Final = 16


def pad(x: te.Tensor, op: Conv2d, value: tirx.Expr | None = None, dtype: str | None = None) -> te.Tensor:
    """Return packed `x` with the convolution's padding; `x` itself if there is nothing to do.

    Parameters
    ----------
    x
        `[N, C/b, H, W, b]`.
    op
        The geometry.
    value
        What is put around `x`, of the result's dtype; None for zeros.
    dtype
        The result's; None for that of `x`.
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


def schedule_pad(sch: st.Schedule, block: st.schedule.SBlockRV) -> None:
    """Order the loops of the padded copy: rows are divided among cores, a block of channels is a vector.

    If a block is a single channel, a row is filled with zeros, and then copied into as vectors of columns.
    """
    loops = sch.get_loops(block)
    if len(loops) != 5:
        return
    *rows, columns, channels = loops
    if int(sch.get(channels).extent) > 1:
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
