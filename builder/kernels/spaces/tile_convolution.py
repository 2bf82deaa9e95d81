"""Convolution of small integers on the tiles of a core (AMX), with int32 sums.

Layouts and zero points are those of `integer_convolution`. A row of a tile is a pixel's block of 64 channels,
so its rows are columns of the output, `stride` pixels of the input apart. Weights are packed
`[OC/16, IC/64, KH, KW, 16, 16, 4]`: the reduction reads a panel of 16 output channels in the order in which
it lies in memory, a kilobyte at a time.

Four tiles of sums stay in registers while the reduction runs: of one or more rows and columns of the output,
and of one or two panels. They are stored once, to the L1 cache, from which the epilogue reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st

from builder.kernels.decisions import Chooser, Decision
from builder.kernels.rewriter import shape_of
from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces import prefetch
from builder.kernels.spaces.convolution import filled
from builder.kernels.spaces.dot_loops import mark_dot
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, Epilogue
from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.kernels.spaces.integer_convolution import pack_weights
from builder.kernels.spaces.padded_copy import pad, schedule_pad
from builder.kernels.spaces.register_tile import divisors, even_part
from builder.kernels.spaces.tile_loops import FEWEST_ROWS, GROUP, MOST_SUMS, STEPS, start_tiles
from builder.target.device_target import DeviceTarget
from builder.target.dot import TILE

KIND: Final = "tile_conv2d"


def fits(op: Conv2d, in_block: int, dtype: str, target: DeviceTarget) -> bool:
    """Whether tiles are the fastest way to do a convolution of packed channels.

    Parameters
    ----------
    op
        The geometry.
    in_block, dtype
        Channels in a block of the input, and its type.
    target
        The device.
    """
    rows = min(op.out_width, TILE.rows) * min(op.out_height, MOST_SUMS)
    return target.dot.tiles and in_block == TILE.bytes and dtype == target.dot.data and rows >= FEWEST_ROWS


def emit(
    bb: relax.BlockBuilder,
    op: Conv2d,
    x: relax.Expr,
    zero: relax.Expr,
    weight: np.ndarray,
    out_block: int,
) -> relax.Expr:
    """Emit the convolution of packed `x`, without groups, as a call of a tensor expression.

    Parameters
    ----------
    bb
        Receives the call.
    op
        The geometry.
    x
        The input, `[N, IC/64, H, W, 64]`, uint8.
    zero
        Its zero point, int32, a scalar.
    weight
        `[OC, IC, KH, KW]`, int8.
    out_block
        `bo`, the channels in a block of the output, a multiple of 16.

    Returns
    -------
    relax.Expr
        The sums of `x * weight`, `[N, OC/bo, OH, OW, bo]`, int32.
    """
    kind, in_block = str(x.ty.dtype), shape_of(x)[4]
    full = filled(weight, in_block, out_block)
    packed = pack_weights(full, in_block, TILE.columns, 1, GROUP)
    packed = packed.reshape(*packed.shape[:4], STEPS, TILE.columns, GROUP)

    def compute(data: te.Tensor, w: te.Tensor, point: te.Tensor) -> te.Tensor:
        return convolve(pad(data, op, point().astype(kind), kind), w, op, out_block)

    call = bb.call_te(
        compute,
        x,
        relax.const(packed),
        zero,
        primfunc_name_hint="integer_conv2d_on_tiles",
        primfunc_attrs=FUSES_ELEMENTWISE,
    )
    return bb.emit(call)


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d, out_block: int) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded."""
    panels, in_blocks, kernel_h, kernel_w, *_ = (int(d) for d in w.shape)
    parts = out_block // TILE.columns
    ic = te.reduce_axis((0, in_blocks), "ic")
    kh = te.reduce_axis((0, kernel_h), "kh")
    kw = te.reduce_axis((0, kernel_w), "kw")
    iq = te.reduce_axis((0, STEPS), "iq")
    ig = te.reduce_axis((0, GROUP), "ig")
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def element(n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = x[n, ic, y * sh + kh * dh, z * sw + kw * dw, iq * GROUP + ig].astype("int32")
        panel, lane = o * parts + v // TILE.columns, v % TILE.columns
        factor = w[panel, ic, kh, kw, iq, lane, ig].astype("int32")
        return te.sum(value * factor, axis=[ic, kh, kw, iq, ig])

    return te.compute(
        (op.batch, panels // parts, op.out_height, op.out_width, out_block),
        element,
        name="conv",
        attrs={SPACE_MARK: KIND},
    )


@dataclass(frozen=True, slots=True)
class TileShape:
    """The decisions of the design space.

    Attributes
    ----------
    m
        Output columns in a tile; not a choice.
    zt, yt, nt
        Tiles along the columns, the rows and the channels of the output, for which sums are in registers.
    oh
        Times `yt` output rows are computed for all channels before the next rows. It divides the number of
        such groups of rows, so that only the last group can be incomplete.
    """

    m: int
    zt: Decision
    yt: Decision
    nt: Decision
    oh: Decision


@dataclass(frozen=True, slots=True)
class TileSpace:
    """The values that each decision may take, and the heuristic's choice among them.

    Any choice fits the registers.
    """

    zt: tuple[int, ...]
    yt: tuple[int, ...]
    nt: tuple[int, ...]
    oh: tuple[int, ...]
    default: TileShape


def space(height: int, width: int, out_block: int, target: DeviceTarget, rows: Rows) -> TileSpace:
    """Return the design space of a convolution on tiles.

    Two panels of weights by two tiles of pixels take the fewest loads. With tiles of at most 8 pixels, a
    panel by four of them does.

    Parameters
    ----------
    height, width
        Rows and columns of the output.
    out_block
        Channels in a block of the output.
    target
        The device.
    rows
        How output rows read the input.
    """
    m, parts = even_part(width, TILE.rows), out_block // TILE.columns
    nt = 2 if parts % 2 == 0 and m > TILE.rows // 2 else 1
    most = MOST_SUMS // nt
    # Only whole tiles are side by side; an incomplete one has the registers for itself.
    zts = divisors(width // m, most) if width % m == 0 else (1,)

    def done(zt: int) -> int:
        """Tiles that are computed for `zt` by `most / zt` at once, counting those that are not there."""
        yt = min(most // zt, height)
        return -(-height // yt) * yt * (MOST_SUMS - zt * yt + 1)

    zt = min(zts, key=lambda t: (done(t), -t))
    yts = tuple(t for t in (1, 2, 4) if t * zt <= most and t <= height)
    yt = max(yts)
    nts = divisors(parts, MOST_SUMS // (zt * yt))
    ohs = divisors(-(-height // yt), height)
    oh = max(divisors(-(-height // yt), max(1, rows.at_once(target.core.l2_bytes) // yt)))
    zts = tuple(t for t in zts if t <= zt)
    return TileSpace(zts, yts, nts, ohs, TileShape(m, zt, yt, max(nts), oh))


def apply(sch: st.Schedule, block: st.schedule.SBlockRV, tiles: TileShape) -> None:
    """Order the loops of a convolution on tiles, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, ic, kh, kw, iq, ig = sch.get_loops(block)
    yo, ym, yt = sch.split(y, [None, tiles.oh, tiles.yt])
    zo, zt, m = sch.split(z, [None, tiles.zt, tiles.m])
    vo, vt, v = sch.split(v, [None, tiles.nt, TILE.columns])
    sch.reorder(n, yo, o, ym, zo, vo, ic, kh, kw, yt, zt, vt, m, iq, v, ig)
    prefetch.mark(sch, kw, rows=tiles.oh)
    outer = sch.fuse(n, yo, o, ym)
    epilogue.place(zo, unrolled=False)
    sch.parallel(outer)
    for loop in (yt, zt, vt):
        sch.unroll(loop)
    start_tiles(sch, block, sums=ic, tile=m)
    mark_dot(sch, v)
    for producer in padding:
        schedule_pad(sch, producer)


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    _, _, height, width, out_block, *_ = (int(sch.get(loop).extent) for loop in sch.get_loops(block))
    s = space(height, width, out_block, target, Rows.of(height, sch.get(block).reads[0].source))
    d = s.default
    shape = TileShape(
        d.m,
        choose("zt", s.zt, d.zt),
        choose("yt", s.yt, d.yt),
        choose("nt", s.nt, d.nt),
        choose("oh", s.oh, d.oh),
    )
    apply(sch, block, shape)
