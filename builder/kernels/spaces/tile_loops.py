"""The loops that `builder.codegen.tile_products` replaces by instructions for tiles (AMX)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.spaces.dot_loops import mark_dot
from builder.target.dot import TILE

SUMS_MARK: Final = "edge.tile_sums"
TILE_MARK: Final = "edge.tile"
ZEROS_MARK: Final = "edge.tile_zeros"
# Elements that one sum adds at once, and how often in a row of the left factor.
GROUP: Final = 4
STEPS: Final = TILE.bytes // GROUP
# Tiles of sums that are in registers together; the other registers hold factors.
MOST_SUMS: Final = 4
# With fewer rows in all tiles, dot products are as fast.
FEWEST_ROWS: Final = 8


def start_tiles(
    sch: st.Schedule, block: SBlockRV, sums: LoopRV, tiles: Sequence[LoopRV], rows: LoopRV, vector: LoopRV
) -> None:
    """Set the sums to zero before the loop `sums`, and mark the three parts of a product on tiles.

    `sums`: the outermost loop of the reduction. Inside are other loops of the reduction, then `tiles`.
    `tiles`: the loops over the tiles of the sums, which are unrolled.
    `rows`: the loop over the rows of a tile. Inside are a loop over groups, then `vector`.
    `vector`: the loop over a vector of sums, which is marked for a dot product. Inside is only the loop over
        the elements of a group.
    """
    for loop in tiles:
        sch.unroll(loop)
    zeros = sch.decompose_reduction(block, sums)
    shared = sum(
        sch.get(loop).same_as(sch.get(other))
        for loop, other in zip(sch.get_loops(zeros), sch.get_loops(block), strict=False)
    )
    loops = sch.get_loops(zeros)
    sch.vectorize(loops[-1])
    sch.annotate(loops[shared], ZEROS_MARK, 1)
    sch.annotate(sums, SUMS_MARK, 1)
    sch.annotate(rows, TILE_MARK, 1)
    mark_dot(sch, vector)
