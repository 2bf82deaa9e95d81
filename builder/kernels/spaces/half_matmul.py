"""Products of float16 rows with constant float16 weights in panels, with sums in float32.

As in `matmul`, panels `[N/nb, K, nb]` are divided among cores, and a tile of `rows` rows x one panel is kept
in registers: the products of one chunk (`half_sums`), whose sums are added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision
from builder.kernels.rewriter import Values, constant_of, shape_of
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.half_sums import MOST
from builder.kernels.spaces.loops import extents_of, fact, longer, unroll_all, vectorise_all
from builder.kernels.spaces.matmul import best_rows, first_columns, pack
from builder.kernels.spaces.register_tile import hold_operand, multiplies_by_element, tilings
from builder.kernels.spaces.tiled import most_rows, pop_rows, whole_rows
from builder.target.device_target import DeviceTarget

KIND: Final = "half_matmul"
_UNROLLED: Final = 8  # steps of K: a vector of halves of each row


def panel_width(columns: int, rows: int, target: DeviceTarget) -> int:
    """Return the columns of a panel: two vectors; up to eight for a single row."""
    lanes = 2 * target.simd.lanes
    vectors = -(-columns // lanes)
    counts = (8, 6, 5, 4, 3, 2, 1) if rows == 1 else (2, 1)
    return lanes * min(counts, key=lambda c: (-(-vectors // c) * c - vectors, -c))


def emit(table: Values, var: relax.Var, call: Call, target: DeviceTarget) -> bool:
    """Replace the product with a constant float16 matrix by one with packed panels.

    Result: whether `var` was defined.
    """
    weight, x = constant_of(call.args[1]), shape_of(call.args[0])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float16 or len(x) < 2:
        return False
    depth, columns = weight.shape
    rows = int(np.prod(x[:-1]))
    panel = panel_width(columns, rows, target)
    whole = np.zeros((-(-depth // MOST) * MOST, columns), weight.dtype)
    whole[:depth] = weight
    packed = relax.const(pack(whole, panel))
    left = table.plain(call.args[0])
    width = 2 * target.simd.lanes
    new = emit_kernel(table.bb, "half_matmul", lambda a, b: product(a, b, columns, width), left, packed)
    table.define(var, new)
    return True


def product(a: te.Tensor, b: te.Tensor, columns: int, width: int) -> te.Tensor:
    """Return the tensor expression of a product with packed panels, float32.

    `a`: the left operand, `[..., K]`.
    `b`: the panels, `[ceil(N / panel), K, panel]`, where K is completed to whole chunks with zeros.
    `columns`: N. If it is not a multiple of `width`, a copy without the columns that complete it follows.
    """
    lead, depth, panel = tuple(int(d) for d in a.shape[:-1]), int(a.shape[-1]), int(b.shape[-1])
    chunks = int(b.shape[1]) // MOST
    full = -(-columns // width) * width
    rows = a
    if depth % MOST:
        rows = te.compute(
            (*lead, chunks * MOST),
            lambda *i: tirx.if_then_else(
                i[-1] < depth, a[(*i[:-1], tirx.min(i[-1], depth - 1))], tirx.const(0, "float16")
            ),
            name="filled",
        )
    k = te.reduce_axis((0, MOST), "k")

    def partial(*i: tirx.Var) -> tirx.Expr:
        *at, chunk, n = i
        step = chunk * MOST + k
        return te.sum(rows[(*at, step)] * b[n // panel, step, n % panel], axis=k)

    parts = te.compute((*lead, chunks, full), partial, name="products")
    chunk = te.reduce_axis((0, chunks), "chunk")
    result = te.compute(
        (*lead, full),
        lambda *i: te.sum(parts[(*i[:-1], chunk, i[-1])].astype("float32"), axis=chunk),
        name="matmul",
        attrs={SPACE_MARK: KIND, "edge.panel": panel},
    )
    return first_columns(result, columns)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`, the sums of chunks."""
    panel = int(fact(sch, block, "edge.panel"))
    width = min(panel, 2 * target.simd.lanes)
    products = sch.get_producers(block)[0]
    filled = sch.get_producers(products)
    count = whole_rows(extents_of(sch, sch.get_loops(block)[:-2]))
    options, vectors, held = tilings(count, 32), panel // width, multiplies_by_element(target)
    best = best_rows(count, options, vectors, most_rows(vectors, target, held=held))
    tile = PartTile(choose("rows", options, best), _UNROLLED, vectors, width, held)
    order_parts(sch, block, products, tile, filled)


@dataclass(frozen=True, slots=True)
class PartTile:
    """The register tile of a product that sums a part of its depth at a time.

    `rows`, `vectors`, `width`: the tile's rows, the vectors of a panel, and the columns of a vector.
    `k`: steps of a part that are unrolled.
    `held`: whether the rows' values of these steps are held in registers.
    """

    rows: Decision
    k: Decision
    vectors: int
    width: int
    held: bool


def order_parts(
    sch: st.Schedule, block: SBlockRV, parts: SBlockRV, tile: PartTile, filled: Sequence[SBlockRV]
) -> None:
    """Order the loops of a product in panels, which adds the sums of its `parts`.

    Panels are divided among cores. The sums of a part stay in registers; what is done to them follows at
    once. `filled` are copies of rows that are completed to whole parts.
    """
    epilogue = Epilogue.after(sch, block)
    *lead, j, part = sch.get_loops(block)
    i = pop_rows(sch, lead)
    io, ii = sch.split(i, [None, tile.rows])
    jo, jt, ji = sch.split(j, [None, tile.vectors, tile.width])
    sch.reorder(jo, *lead, io, part, ii, jt, ji)
    epilogue.place(io, vector=tile.width)
    sch.compute_at(parts, part, preserve_unit_loops=True)
    *outer, n, k = sch.get_loops(parts)[-(len(lead) + 4) :]
    row = (longer(sch, outer) or outer[:1])[-1]
    nt, ni = sch.split(n, [None, tile.width])
    ko, ki = sch.split(k, [None, tile.k])
    sch.reorder(ko, ki, row, nt, ni)
    if tile.held:
        hold_operand(sch, parts, ko)
    unroll_all(sch, ki, row, nt, ii, jt)
    vectorise_all(sch, ni, ji)
    sch.parallel(jo)
    sch.decompose_reduction(parts, ko)
    sch.decompose_reduction(block, part)
    for copy in filled:
        sch.vectorize(sch.split(sch.get_loops(copy)[-1], [None, tile.width])[1])
