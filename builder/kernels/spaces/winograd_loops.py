"""The loops of Winograd's two transforms, which the float and the integer convolution have in common.

The product between them, where the time is spent, is ordered by each of them.
"""

from __future__ import annotations

from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.loops import extent_of, unroll_all, vectorise_all
from builder.kernels.spaces.winograd_stages import Tile


def order_input(sch: st.Schedule, band: LoopRV | None = None) -> None:
    """Order the loops of the stages `pad`, `half_in` and `data`: tile after tile, each from the picture.

    `band`: the loop of a band of rows, inside which the stages are computed; None if each does all tiles.
    """
    data, half_in, pad = sch.get_sblock("data"), sch.get_sblock("half_in"), sch.get_sblock("pad")
    if band is not None:
        sch.compute_at(data, band, preserve_unit_loops=True)
    xi, group, c, tile, v = sch.get_loops(data)[-5:]
    high = extent_of(sch, sch.get_loops(half_in)[-3])
    e, nu = sch.split(xi, [high, None])
    sch.reorder(c, group, tile, e, nu, v)
    sch.compute_at(half_in, tile, preserve_unit_loops=True)
    *_, a, b, lane = sch.get_loops(half_in)
    # The transform reads each element of the window several times: check once whether it is in the picture.
    sch.compute_at(pad, tile, preserve_unit_loops=True)
    *_, y, z, channel = sch.get_loops(pad)
    unroll_all(sch, a, b, e, nu, y, z)
    vectorise_all(sch, lane, v, channel)
    if band is None:
        sch.parallel(sch.fuse(c, group, tile))


def order_output(
    sch: st.Schedule,
    half_out: SBlockRV,
    epilogue: Epilogue,
    size: Tile,
    band: int | None = None,
    panel: int | None = None,
) -> tuple[LoopRV, LoopRV | None]:
    """Order the loops of the output's transform and of what follows it: tile after tile.

    `half_out`: the first half of the transform.
    `epilogue`: the last stage, which has the second half inlined.
    `size`: rows and columns of the output's tile.
    `band`: rows of tiles in a band; None if each stage does all tiles.
    `panel`: blocks of channels of a band that are transformed before the next ones; None for all of them.
    `shared`: the parallel loop: over the bands, or over blocks of channels and rows of tiles.
    `inside`: the loop in which the product is computed; None without bands.
    """
    i, o, y, z, v = sch.get_loops(epilogue.block)
    outer: LoopRV | None = None
    first: LoopRV | None = None
    if band is not None:
        outer, y = sch.split(y, [None, band * size[0]])
        if panel is not None:
            first, o = sch.split(o, [None, panel])
    yo, yi = sch.split(y, [None, size[0]])
    zo, zi = sch.split(z, [None, size[1]])
    around = [loop for loop in (outer, first) if loop is not None]
    sch.reorder(i, *around, o, yo, zo, yi, zi, v)
    sch.compute_at(half_out, zo, preserve_unit_loops=True)
    *_, a, nu, lane = sch.get_loops(half_out)
    unroll_all(sch, a, nu, yi, zi)
    vectorise_all(sch, lane, v)
    shared = sch.fuse(i, o, yo) if outer is None else sch.fuse(i, outer)
    sch.parallel(shared)
    if outer is None:
        return shared, None
    return shared, shared if first is None else first
