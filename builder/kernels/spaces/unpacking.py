"""Unpacking of channels: `[N, C/b, H, W, b]` becomes `[N, C, H, W]`.

Neighbours in a row of the result are a block apart in the source. So the channels of a block are computed one
after another for the same few pixels, whose cache lines then serve all channels.
"""

from __future__ import annotations

from typing import Final

from tvm import s_tir as st
from tvm import te, tirx
from tvm.s_tir.schedule import SBlockRV

from builder.errors import UnsuitedError
from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.spaces import fallback
from builder.kernels.spaces.loops import extent_of, fact
from builder.target.device_target import DeviceTarget

KIND: Final = "unpack"
_RANK: Final = 4


def unpack(x: te.Tensor, channels: int, group: int, kind: str = KIND) -> te.Tensor:
    """Convert `[N, blocks, H, W, b]`, with padding after each `group` channels, to `[N, channels, H, W]`.

    `kind` is the kind of design space that orders the function.
    """
    n, _, h, w, block = (int(d) for d in x.shape)
    padded = -(-group // block) * block

    def element(i: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var) -> tirx.Expr:
        at = c if group in (channels, padded) else c // group * padded + c % group
        return x[i, at // block, y, z, at % block]

    mark = {SPACE_MARK: kind, "edge.block": block}
    return te.compute((n, channels, h, w), element, name="unpack", attrs=mark)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: a few pixels of a block of channels are one job.

    Raises `UnsuitedError` if the function holds more than the conversion and element-wise blocks.
    """
    del choose
    size = int(fact(sch, block, "edge.block"))
    fallback.inline(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    if len(blocks) != 1 or len(sch.get_loops(blocks[0])) != _RANK:
        raise UnsuitedError("expected a conversion and element-wise blocks, got another block")
    image, channel, row, column = sch.get_loops(blocks[0])
    lanes = min(target.simd.lanes, extent_of(sch, column))
    outer, inner = sch.split(channel, [None, min(size, extent_of(sch, channel))])
    pixels, vector = sch.split(column, [None, lanes])
    sch.reorder(image, outer, row, pixels, inner, vector)
    sch.parallel(sch.fuse(image, outer, row))
    sch.vectorize(vector)
