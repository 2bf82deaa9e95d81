"""Matrix products: with constant weights packed in panels, and of two computed matrices.

Weights become `[N/nb, K, nb]`, where a panel of `nb` columns is one to three vectors wide, or up to eight for
a single row. A tile of `rows` rows x one panel is kept in registers while K runs. Panels are the outer,
parallel loop, so each weight is read by one core; if cores cannot share the panels evenly, they share the
tiles. The last panel is filled with zeros; only the zeros that complete a vector are multiplied. On x86, each
tile prefetches its share of the next panel. Without that, waiting for weights takes a fifth of the time.
If a panel is long, K is divided into blocks (`blocks_of_depth`): all tiles read a block before the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import (
    Values,
    constant_of,
    definition,
    emit_weights,
    is_halves,
    legalise_as_tvm,
    shape_of,
)
from builder.kernels.spaces import prefetch, shares, tiled
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, Epilogue, emit_kernel
from builder.kernels.spaces.loops import extent_of, extents_of, fact, unroll_all, vectorise_all
from builder.kernels.spaces.register_tile import even_part, hold_operand, multiplies_by_element, tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "matmul"
BATCHED: Final = "batch_matmul"
# Products of at most so many rows decode their weights in registers: with more rows, each tile would again.
FEW_ROWS: Final = 8
_FLOAT_BYTES: Final = 4
# From so many rows on, tiles of rows are divided among cores too if the panels are too few for them.
_MANY_ROWS: Final = 64
_GROUPS: Final = 2  # of rows that cores share, if the depth is divided into blocks
_RANK: Final = 4  # of the operands in attention: batch, heads, rows, columns
_HEAD_SWAP: Final = [0, 2, 1, 3]  # the axes of a transpose that exchanges heads and rows


def panel_width(columns: int, rows: int, target: DeviceTarget) -> int:
    """Return the columns of a panel: some vectors, or half a vector if there are no more columns.

    Counts of vectors that divide the columns come first, then those that need the fewest panels. With three
    vectors, each broadcast serves more products. If the rows are held in registers too (`register_tile`), two
    vectors leave more registers for rows. With a single row, only the panel keeps the multipliers busy: eight
    vectors cover the latency of a multiply-add.
    """
    lanes = target.simd.lanes
    counts: tuple[int, ...] = (2, 3, 1) if multiplies_by_element(target) else (3, 2, 1)
    if rows == 1:
        counts = tuple(c for c in (8, 6, 5, 4, 3, 2, 1) if c <= target.simd.registers // 2)
    if lanes >= 8 and columns <= lanes // 2:
        return lanes // 2
    vectors = -(-columns // lanes)
    dividing = next((c for c in counts if columns % (c * lanes) == 0), None)
    return lanes * (dividing or min(counts, key=lambda c: (-(-vectors // c), abs(-vectors % c))))


def pack(weight: np.ndarray, panel: int) -> np.ndarray:
    """Return `[..., N]` in panels of `panel` columns, `[ceil(N / panel), ..., panel]`, filled with zeros."""
    *lead, columns = weight.shape
    full = np.zeros((*lead, -(-columns // panel) * panel), weight.dtype)
    full[..., :columns] = weight
    return np.ascontiguousarray(np.moveaxis(full.reshape(*lead, -1, panel), -2, 0))


def first_columns(product: te.Tensor, columns: int) -> te.Tensor:
    """Return a product without the columns that complete its last panel."""
    if int(product.shape[-1]) == columns:
        return product
    return te.compute((*product.shape[:-1], columns), product, name="columns")


def emit(table: Values, var: relax.Var, call: Call, target: DeviceTarget) -> bool:
    """Replace the product with a constant float32 matrix by one with packed panels.

    Result: whether `var` was defined.
    """
    weight = constant_of(call.args[1])
    left = shape_of(call.args[0])
    if weight is None or weight.ndim != 2 or weight.dtype != np.float32 or len(left) < 2:
        return False
    columns, rows = weight.shape[1], int(np.prod(left[:-1]))
    panels = pack(weight, panel_width(columns, rows, target))
    if rows <= FEW_ROWS and _reads_halves(target) and is_halves(panels):
        packed = relax.const(panels.astype(np.float16))
    else:
        packed = emit_weights(table.bb, panels)
    table.define(var, emit_packed(table.bb, table.plain(call.args[0]), packed, columns, target))
    return True


def _reads_halves(target: DeviceTarget) -> bool:
    """Whether `target` has instructions that convert vectors of float16 to float32."""
    return target.arch == "aarch64" or "f16c" in target.features


def emit_packed(
    bb: relax.BlockBuilder, x: relax.Expr, packed: relax.Expr, columns: int, target: DeviceTarget
) -> relax.Expr:
    """Emit the product of `x`, `[..., K]`, with panels `[ceil(N / panel), K, panel]`; N is `columns`.

    Panels of float16 are converted in registers.
    """
    _, depth, panel = shape_of(packed)
    form = tiled.Form.of(shape_of(x)[:-1], depth, columns, panel, target)
    if form is not None and str(packed.ty.dtype) == "float32":
        return tiled.emit(bb, x, packed, columns, form)
    width = min(panel, target.simd.lanes)
    return emit_kernel(bb, "matmul", lambda a, b: product(a, b, columns, width), x, packed)


def product(a: te.Tensor, b: te.Tensor, columns: int, width: int) -> te.Tensor:
    """Return the tensor expression of a product with packed panels.

    Parameters
    ----------
    a
        The left operand, `[..., K]`.
    b
        The panels, `[ceil(N / panel), K, panel]`, float32 or float16.
    columns
        N.
    width
        Columns of a vector.

    Returns
    -------
    te.Tensor
        `[..., N]`. Its producer, which is marked, has vectors as an axis of their own. So the last one is
        complete, and the sums of the last tile, which has fewer vectors, are as far apart as in other tiles.
    """
    _, depth, panel = (int(d) for d in b.shape)
    k = te.reduce_axis((0, depth), "k")
    vectors = panel // width

    def element(*i: tirx.Var) -> tirx.Expr:
        *row, vector, lane = i
        weight = b[vector // vectors, k, vector % vectors * width + lane].astype("float32")
        return te.sum(a[(*row, k)] * weight, axis=k)

    product = te.compute(
        (*a.shape[:-1], -(-columns // width), width),
        element,
        name="matmul",
        attrs={SPACE_MARK: KIND, "edge.panel": panel},
    )
    return te.compute(
        (*a.shape[:-1], columns), lambda *i: product[(*i[:-1], i[-1] // width, i[-1] % width)], name="columns"
    )


@dataclass(frozen=True, slots=True)
class MatmulTiles:
    """The decisions of the design space.

    `rows`: rows held in registers.
    `k`: steps of the reduction unrolled.
    `held`: whether the rows' values of these steps are held in registers; see `register_tile.hold_operand`.
    `blocks`: blocks of the reduction, whose sums are added in memory; see `blocks_of_depth`.
    """

    rows: Decision
    k: Decision
    held: bool = False
    blocks: int = 1


def space(rows: int, depth: int, vectors: int, target: DeviceTarget) -> Space[MatmulTiles]:
    """Return the design space of a product.

    The heuristic takes the most rows whose accumulators fit the registers, beside a row of the panel
    and one broadcast.

    `rows`, `depth`: the extent that is divided into tiles, and K.
    """
    options = tilings(rows, 32)
    ks = tuple(k for k in (1, 2, 4, 8) if k <= depth)
    k = max(k for k in ks if k <= 4)
    held = multiplies_by_element(target) and k == 4
    most = tiled.most_rows(vectors, target, held=held)
    return Space(MatmulTiles(best_rows(rows, options, vectors, most), k, held), {"rows": options, "k": ks})


def best_rows(rows: int, options: tuple[int, ...], vectors: int, most: int) -> int:
    """Return how many rows a tile has, of `options` up to `most`: those with the fewest loads of all tiles.

    For each step of K, a tile loads `vectors` vectors of the panel once, and a value for each of its rows.
    """
    return min((r for r in options if r <= most), key=lambda r: (-(-rows // r) * (vectors + 1), -r))


def blocks_of_depth(rows: int, depth: int, panel: int, tile: int, target: DeviceTarget) -> int:
    """Return into how many blocks the depth is divided.

    Beside a long panel, the L2 cache has no room for the rows and for the next panel. So all tiles of rows
    read one block of the panel, while the next block is prefetched. Sums are added from block to block; those
    of all rows must fit the L1 cache. The values of a tile's rows also stay there during a block.

    `panel`, `tile`: columns of a panel, and rows of a register tile.
    Result: 1 if the depth stays whole. A depth without a divisor of a suitable size does.
    """
    core = target.core
    long = _FLOAT_BYTES * depth * panel > core.l2_bytes // 4
    if not core.prefetches or rows <= tile or not long or _FLOAT_BYTES * rows * panel > core.l1_bytes:
        return 1
    block = even_part(depth, core.l1_bytes // 3 // (_FLOAT_BYTES * tile))
    return depth // block if depth % block == 0 else 1


def _apply_in_blocks(sch: st.Schedule, block: SBlockRV, tiles: MatmulTiles, width: int) -> None:
    """Order the loops of a product whose depth is divided into blocks, and of its epilogue."""
    panel = int(fact(sch, block, "edge.panel"))
    chunk, _ = sch.split(sch.get_loops(block)[-1], [tiles.blocks, None])
    part = sch.rfactor(chunk, 0)
    epilogue = Epilogue.after(sch, block)
    *lead, j, ji, chunk = sch.get_loops(block)
    extents = extents_of(sch, lead)
    i = tiled.pop_rows(sch, lead)
    jo, jt = sch.split(j, [None, panel // width])
    whole = math.prod(extents) < _MANY_ROWS or shares.is_even(extent_of(sch, jo))
    groups = 1 if whole else _GROUPS
    group, io, ii = sch.split(i, [groups, None, tiles.rows])
    sch.reorder(jo, group, chunk, *lead, io, ii, jt, ji)
    outer = sch.fuse(jo, group)
    epilogue.place(outer, vector=width, unrolled=False)
    sch.compute_at(part, io, preserve_unit_loops=True)
    *rows, nt, ni, k = sch.get_loops(part)[-(len(extents) + 3) :]
    ko, ki = sch.split(k, [None, tiles.k])
    sch.reorder(ko, ki, *rows, nt, ni)
    sch.set_scope(part, 0, "local")
    prefetch.mark(sch, ko, rows=groups, always=True, panels=tiles.blocks)
    sch.parallel(outer)
    vectorise_all(sch, ji, ni)
    unroll_all(sch, jt, ii, nt, *rows, ki)
    sch.decompose_reduction(part, ko)
    sch.decompose_reduction(block, chunk)


def apply(sch: st.Schedule, block: SBlockRV, tiles: MatmulTiles, width: int, target: DeviceTarget) -> None:
    """Order the loops of a product with packed panels, and of its epilogue."""
    panel = int(fact(sch, block, "edge.panel"))
    if tiles.blocks > 1:
        _apply_in_blocks(sch, block, tiles, width)
        return
    epilogue = Epilogue.after(sch, block)
    *lead, j, ji, k = sch.get_loops(block)
    panel_bytes = 4 * panel * extent_of(sch, k)
    extents = extents_of(sch, lead)
    i = tiled.pop_rows(sch, lead)
    io, ii = sch.split(i, [None, tiles.rows])
    jo, jt = sch.split(j, [None, panel // width])
    ko, ki = sch.split(k, [None, tiles.k])
    sch.reorder(jo, *lead, io, ko, ki, ii, jt, ji)
    epilogue.place(io, vector=width)
    if tiles.held:
        hold_operand(sch, block, ko)
    whole = math.prod(extents) < _MANY_ROWS or shares.is_even(extent_of(sch, jo))
    several = extent_of(sch, ii) > 1
    if several and target.core.prefetches and panel_bytes <= target.core.l2_bytes // 2:
        # A single row reads all weights in order, which the processor sees by itself.
        sch.set_scope(block, 0, "local")
        rounds = math.prod(extents_of(sch, (*lead, io)))
        prefetch.mark(sch, ko, rows=1 if whole else rounds, always=True)
    sch.parallel(jo if whole else sch.fuse(jo, *lead, io))
    sch.vectorize(ji)
    unroll_all(sch, jt, ii, ki)
    sch.decompose_reduction(block, ko)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`, a product with panels, by the decisions of `choose`."""
    panel = int(fact(sch, block, "edge.panel"))
    width = min(panel, target.simd.lanes)
    *rows, _, _, depth = extents_of(sch, sch.get_loops(block))
    s = space(tiled.whole_rows(rows), depth, panel // width, target)
    blocks = blocks_of_depth(math.prod(rows), depth, panel, int(s.default.rows), target)
    apply(sch, block, replace(s.decide(choose), blocks=blocks), width, target)


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a product of computed matrices: ours for float32 with the same rank and batch, else TVM's."""
    left, right = shape_of(call.args[0]), shape_of(call.args[1])
    same = len(left) == len(right) >= 2 and left[:-2] == right[:-2]
    if not same or str(call.ty.dtype) != "float32":
        return legalise_as_tvm(bb, call)

    def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, left[-1]), "k")
        return te.compute(
            (*left[:-1], right[-1]),
            lambda *i: te.sum(a[(*i[:-1], k)] * b[(*i[:-2], k, i[-1])], axis=k),
            name="matmul",
            attrs={SPACE_MARK: BATCHED},
        )

    return bb.call_te(
        compute, *call.args, primfunc_name_hint="batch_matmul", primfunc_attrs=FUSES_ELEMENTWISE
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """The operands of attention's products: a matrix for each head, `[batch, heads, rows, columns]`.

    `left_rows_first`, `right_rows_first`: whether they are stored as a projection leaves them instead:
        `[batch, rows, heads, columns]`.
    """

    left: relax.Expr
    right: relax.Expr
    left_rows_first: bool
    right_rows_first: bool

    @classmethod
    def of(cls, table: Values, call: Call) -> Heads | None:
        """Return the operands of a product of two computed tensors of rank 4, None for any other product.

        A transpose that only exchanges heads and rows is taken off an operand.
        """
        left, right = shape_of(call.args[0]), shape_of(call.args[1])
        if (
            len(left) != _RANK
            or len(right) != _RANK
            or left[:2] != right[:2]
            or str(call.ty.dtype) != "float32"
        ):
            return None
        a, a_rows_first = _without_head_swap(table, table.plain(call.args[0]))
        b, b_rows_first = _without_head_swap(table, table.plain(call.args[1]))
        return cls(a, b, a_rows_first, b_rows_first)

    def emit(self, bb: relax.BlockBuilder, *, rows_first: bool) -> relax.Expr:
        """Emit the product, stored as `[batch, rows, heads, columns]` if `rows_first`."""

        def compute(a: te.Tensor, b: te.Tensor) -> te.Tensor:
            batch, depth = a.shape[0], int(a.shape[3])
            heads, rows = (a.shape[2], a.shape[1]) if self.left_rows_first else (a.shape[1], a.shape[2])
            k = te.reduce_axis((0, depth), "k")

            def element(n: tirx.Var, p: tirx.Var, q: tirx.Var, j: tirx.Var) -> tirx.Expr:
                h, i = (q, p) if rows_first else (p, q)
                left = a[n, i, h, k] if self.left_rows_first else a[n, h, i, k]
                return te.sum(left * (b[n, k, h, j] if self.right_rows_first else b[n, h, k, j]), axis=k)

            shape = (batch, rows, heads, b.shape[3]) if rows_first else (batch, heads, rows, b.shape[3])
            mark = {SPACE_MARK: BATCHED, "edge.turned": int(rows_first)}
            return te.compute(shape, element, name="matmul", attrs=mark)

        return emit_kernel(bb, "batch_matmul", compute, self.left, self.right)


def swaps_heads_and_rows(call: Call) -> bool:
    """Whether a transpose only exchanges heads and rows."""
    return call.attrs.axes is not None and [int(a) for a in call.attrs.axes] == _HEAD_SWAP


def _without_head_swap(table: Values, expr: relax.Expr) -> tuple[relax.Expr, bool]:
    call = definition(table, expr, "relax.permute_dims")
    return (call.args[0], True) if call is not None and swaps_heads_and_rows(call) else (expr, False)


def schedule_batched(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops around a product of computed matrices by the decisions of `choose`.

    A tile of rows x vectors is kept in registers; matrices and blocks of rows are divided among cores.
    """
    epilogue = Epilogue.after(sch, block)
    *batch, i, j, k = sch.get_loops(block)
    if int(sch.get(block).annotations.get("edge.turned", 0)):
        i, batch[-1] = batch[-1], i
    rows, columns, depth = extents_of(sch, (i, j, k))
    lanes = target.simd.lanes
    width = min(lanes, columns)
    count = -(-columns // width)
    vectors = min((3, 2, 1), key=lambda c: (-(-count // c) * (c + 1), -c))
    tiles = space(rows, depth, vectors, target).decide(choose)
    io, ii = sch.split(i, [None, tiles.rows])
    jo, jt, ji = sch.split(j, [None, vectors, width])
    ko, ki = sch.split(k, [None, tiles.k])
    sch.reorder(*batch, io, jo, ko, ki, ii, jt, ji)
    outer = sch.fuse(*batch, io)
    epilogue.place(jo, vector=width)
    if tiles.held:
        hold_operand(sch, block, ko)
    sch.parallel(outer)
    sch.vectorize(ji)
    unroll_all(sch, jt, ii, ki)
    sch.decompose_reduction(block, ko)
