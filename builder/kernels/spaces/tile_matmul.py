"""Products of bytes with constant weights on the tiles of a core (AMX), with int32 sums.

The left operand is `[..., K]` of `uint8`; weights become `[N/16, K/4, 16, 4]`, K filled to whole tiles with
zeros. The sums of two tiles of rows by two panels of weights stay in registers while K runs. Then they are
stored to the L1 cache, from which the epilogue reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision
from builder.kernels.rewriter import Values, constant_of, shape_of
from builder.kernels.spaces import prefetch, tiled
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.integer_matmul import filled_rows, pack
from builder.kernels.spaces.loops import extents_of
from builder.kernels.spaces.matmul import first_columns
from builder.kernels.spaces.register_tile import divisors, even_part
from builder.kernels.spaces.tile_loops import FEWEST_ROWS, GROUP, MOST_SUMS, STEPS, start_tiles
from builder.target.device_target import DeviceTarget
from builder.target.dot import TILE

KIND: Final = "tile_matmul"
# With fewer pairs of panels for a core, rows are divided among cores too.
_PAIRS: Final = 3


def emit(table: Values, var: relax.Var, call: Call, target: DeviceTarget) -> bool:
    """Replace the product with a constant int8 matrix by one on tiles, if the core has them.

    Result: whether `var` was defined.
    """
    weight, left = constant_of(call.args[1]), shape_of(call.args[0])
    if weight is None or weight.ndim != 2 or weight.dtype != np.int8 or len(left) < 2 or not target.dot.tiles:
        return False
    if str(call.ty.dtype) != "int32" or str(call.args[0].ty.dtype) != target.dot.data:
        return False
    rows = tiled.whole_rows(left[:-1])
    if rows < FEWEST_ROWS:
        return False
    columns, packed = weight.shape[1], pack_panels(weight, rows)
    new = emit_kernel(
        table.bb,
        "integer_matmul_on_tiles",
        lambda a, b: product(filled_rows(a, TILE.bytes, target.dot.data), b, columns),
        table.plain(call.args[0]),
        relax.const(packed),
    )
    table.define(var, new)
    return True


def pack_panels(weight: np.ndarray, rows: int) -> np.ndarray:
    """Return `[K, N]` as `[N/16, K/4, 16, 4]` for a left operand of `rows` rows, filled to whole tiles."""
    depth, columns = weight.shape
    together = min(MOST_SUMS // rows_at_once(rows), -(-columns // TILE.columns))
    width, step = TILE.columns * together, TILE.bytes
    full = np.zeros((-(-depth // step) * step, -(-columns // width) * width), weight.dtype)
    full[:depth, :columns] = weight
    return pack(full, TILE.columns, GROUP)


def rows_at_once(rows: int) -> int:
    """Return how many tiles of `rows` rows are multiplied at once: two, if all tiles are whole."""
    m = even_part(rows, TILE.rows)
    return 2 if rows % (2 * m) == 0 else 1


def product(a: te.Tensor, b: te.Tensor, columns: int) -> te.Tensor:
    """Return the tensor expression of a product with packed panels.

    `a`: the left operand, `[..., K]`, K a multiple of 64 bytes.
    `b`: the panels, `[N / 16, K / 4, 16, 4]`.
    `columns`: N. If the panels have more, the product has them too, and a copy without them follows.
    """
    panels, steps, panel, group = (int(d) for d in b.shape)
    ko = te.reduce_axis((0, steps // STEPS), "ko")
    kq = te.reduce_axis((0, STEPS), "kq")
    kg = te.reduce_axis((0, group), "kg")

    def element(*i: tirx.Var) -> tirx.Expr:
        value = a(*i[:-1], (ko * STEPS + kq) * group + kg).astype("int32")
        factor = b(i[-1] // panel, ko * STEPS + kq, i[-1] % panel, kg).astype("int32")
        return te.sum(value * factor, axis=[ko, kq, kg])

    full = te.compute((*a.shape[:-1], panels * panel), element, name="matmul", attrs={SPACE_MARK: KIND})
    return first_columns(full, columns)


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """The decisions of the design space.

    `m`: rows in a tile; not a choice.
    `mt`, `nt`: tiles of rows, and panels, whose sums are in registers.
    """

    m: int
    mt: Decision
    nt: Decision


def apply(sch: st.Schedule, block: SBlockRV, tiles: MatmulTiles, *, few: bool) -> None:
    """Order the loops of a product on tiles, of its operand and of its epilogue.

    `few`: whether there are too few panels to divide only these among cores.
    """
    operands = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    *lead, j, ko, kq, kg = sch.get_loops(block)
    i = tiled.pop_rows(sch, lead)
    io, it, m = sch.split(i, [None, tiles.mt, tiles.m])
    jo, jt, v = sch.split(j, [None, tiles.nt, TILE.columns])
    sch.reorder(jo, *lead, io, ko, it, jt, m, kq, v, kg)
    rounds = math.prod(extents_of(sch, (*lead, io))) if few else 1
    prefetch.mark(sch, ko, rows=rounds)
    outer = sch.fuse(jo, *lead, io) if few else jo
    epilogue.place(outer if few else io, vector=TILE.columns, unrolled=False)
    sch.parallel(outer)
    start_tiles(sch, block, sums=ko, tiles=(it, jt), rows=m, vector=v)
    for operand in operands:
        *rows, row = sch.get_loops(operand)
        itemsize = np.dtype(str(sch.get(operand).writes[0].source.dtype)).itemsize
        sch.vectorize(sch.split(row, [None, TILE.bytes // itemsize])[1])
        sch.parallel(sch.fuse(*rows) if len(rows) > 1 else rows[0])


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    *lead, columns, _, _, _ = extents_of(sch, sch.get_loops(block))
    rows, panels = tiled.whole_rows(lead), columns // TILE.columns
    m = even_part(rows, TILE.rows)
    mts = divisors(rows_at_once(rows), 2)
    nts = divisors(panels, MOST_SUMS // max(mts))
    tiles = MatmulTiles(m, choose("mt", mts, max(mts)), choose("nt", nts, max(nts)))
    apply(sch, block, tiles, few=panels // max(nts) < _PAIRS * target.cores)
