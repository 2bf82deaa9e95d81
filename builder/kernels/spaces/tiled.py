"""Matrix products with constant weights and packed rows: in tiles, or by Strassen's algorithm.

Rows become `[K / s, rows of a tile, s]`, so that a register tile reads them sequentially. The last tile is
completed by repeating the last row, so any number of rows runs at the speed of whole tiles.

A product with many rows, columns and a large depth is computed as one of 2 x 2 blocks, which takes seven
products instead of eight (Strassen, "Gaussian elimination is not optimal", 1969; here in Winograd's form with
15 additions). Successive rows belong to different blocks, and so do successive panels, so that the operands
of an addition are close together. Sums of weights are computed at load, by a node that reads only constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.spaces.epilogue import NEVER_FUSED, Epilogue, emit_kernel
from builder.kernels.spaces.loops import extent_of, extents_of, unroll_all
from builder.kernels.spaces.register_tile import hold_operand, multiplies_by_element, unroll_rounds
from builder.target.device_target import DeviceTarget

KIND: Final = "tiled_matmul"
WEIGHTS_KIND: Final = "strassen_weights"
_PRODUCTS: Final = 7  # of Strassen's algorithm
# Fewer rows than this are best read in place. Strassen's algorithm saves more than its additions cost from
# `_MANY_ROWS` rows, and a depth and columns of `_MANY`, on.
_FEW_ROWS: Final = 4
_MANY_ROWS, _MANY = 64, 256


@dataclass(frozen=True, slots=True)
class Form:
    """How a product's rows are packed.

    `rows`: rows of a register tile.
    `step`: adjacent values of a row.
    `strassen`: whether Strassen's algorithm is used.
    """

    rows: int
    step: int
    strassen: bool

    @classmethod
    def of(
        cls, lead: Sequence[int], depth: int, columns: int, panel: int, target: DeviceTarget
    ) -> Form | None:
        """Choose the form of a product; None if the rows are best read without packing them.

        `lead`: the axes of the left operand before its last: their product is the number of rows.
        `columns`, `panel`: N, and the columns in a panel of the weights.
        """
        rows = prod(lead)
        lanes = target.simd.lanes
        vectors = -(-panel // lanes)
        element = multiplies_by_element(target)
        most = most_rows(vectors, target, held=element)
        halves = rows >= _MANY_ROWS and depth % (2 * lanes) == 0 and columns % (2 * panel) == 0
        strassen = halves and element and depth >= _MANY and columns >= _MANY
        count = -(-rows // 2) if strassen else rows
        step = lanes if depth % (2 * lanes if strassen else lanes) == 0 else 1
        if not strassen:
            enough = whole_rows(lead) >= min(rows, _FEW_ROWS)
            if step == 1 or most == 1 or rows < _FEW_ROWS or (enough and not element):
                return None
        sizes = range(min(_FEW_ROWS, most), most + 1)
        best = min(sizes, key=lambda r: (-(-count // r) * (r * vectors + vectors + r / 2), -r))
        return cls(best, step, strassen)


def whole_rows(lead: Sequence[int]) -> int:
    """Return the extent that is divided into tiles, because no tile may cross an axis of `lead`."""
    long = [extent for extent in lead if extent > 1]
    return long[-1] if long else 1


def pop_rows(sch: st.Schedule, lead: list[LoopRV]) -> LoopRV:
    """Take the loop that is divided into tiles out of those over rows: the last with more than one round."""
    several = (at for at, loop in enumerate(lead) if extent_of(sch, loop) > 1)
    return lead.pop(max(several, default=len(lead) - 1))


def most_rows(vectors: int, target: DeviceTarget, *, held: bool) -> int:
    """Return the most rows of `vectors` accumulators that leave enough registers for the operands.

    Without held rows a quarter of the registers is left: with 16 registers 4 rows x 3 vectors run at 99 % of
    the peak, 3 rows at 90 %, 2 rows at 68 %, and 5 rows, which spill, at 57 %.
    """
    registers = target.simd.registers
    if held:
        return max(1, (registers - 1 - min(vectors, 2)) // (vectors + 1))
    return max(1, registers * 3 // 4 // vectors)


def emit(bb: relax.BlockBuilder, x: relax.Expr, packed: relax.Expr, columns: int, form: Form) -> relax.Expr:
    """Emit the product of `x`, `[..., K]`, with a matrix in panels, `[ceil(N / panel), K, panel]`."""
    weights = packed
    if form.strassen:
        weights = emit_kernel(bb, "strassen_weights", transform_weights, packed, attrs=NEVER_FUSED)
    return emit_kernel(bb, "matmul", lambda a, b: product(a, b, columns, form), x, weights)


def transform_weights(b: te.Tensor) -> te.Tensor:
    """Return Strassen's right factors of `[N / panel, K, panel]`, as `[N / panel / 2, 7, K / 2, panel]`."""
    panels, depth, panel = (int(d) for d in b.shape)
    half = depth // 2

    def element(o: tirx.Var, p: tirx.Var, k: tirx.Var, j: tirx.Var) -> tirx.Expr:
        b11, b12 = b[2 * o, k, j], b[2 * o + 1, k, j]
        b21, b22 = b[2 * o, k + half, j], b[2 * o + 1, k + half, j]
        t1, t3 = b12 - b11, b22 - b12
        t2 = b22 - t1
        return _choose(p, (b11, b21, b22, t2 - b21, t1, t2, t3))

    shape = (panels // 2, _PRODUCTS, half, panel)
    return te.compute(shape, element, name="weights", attrs={SPACE_MARK: WEIGHTS_KIND})


def _choose(index: tirx.Expr, values: Sequence[tirx.Expr]) -> tirx.Expr:
    """Select `values[index]`; once the loop over `index` is unrolled, one value remains."""
    result = values[-1]
    for k in range(len(values) - 2, -1, -1):
        result = tirx.Select(index == k, values[k], result)
    return result


def product(a: te.Tensor, b: te.Tensor, columns: int, form: Form) -> te.Tensor:
    """Return the tensor expression: packed rows, their products with the panels, and the result.

    `a`: the left operand, `[..., K]`.
    `b`: the panels, or Strassen's right factors of them.
    """
    lead = tuple(int(d) for d in a.shape[:-1])
    panel, depth = int(b.shape[-1]), int(b.shape[-2])
    rows, r, s = prod(lead), form.rows, form.step
    tiles = -(-rows // (2 * r if form.strassen else r))

    def at(row: tirx.Expr, k: tirx.Expr) -> tirx.Expr:
        row = tirx.min(row, tirx.const(rows - 1, "int32"))
        return a[(*_unravelled(row, lead), k)]

    def left(p: tirx.Var, t: tirx.Var, o: tirx.Var, i: tirx.Var, v: tirx.Var) -> tirx.Expr:
        row, k = t * r + i, o * s + v
        if not form.strassen:
            return at(row, k)
        a11, a12 = at(2 * row, k), at(2 * row, k + depth)
        a21, a22 = at(2 * row + 1, k), at(2 * row + 1, k + depth)
        s1 = a21 + a22
        s2 = s1 - a11
        return _choose(p, (a11, a12, a12 - s2, a22, s1, s2, a11 - a21))

    count = _PRODUCTS if form.strassen else 1
    packed = te.compute((count, tiles, depth // s, r, s), left, name="left")
    ko, ki = te.reduce_axis((0, depth // s), "ko"), te.reduce_axis((0, s), "ki")

    def term(o: tirx.Var, p: tirx.Var, t: tirx.Var, i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        k = ko * s + ki
        right = b[o, p, k, j] if form.strassen else b[o, k, j]
        return te.sum(packed[p, t, ko, i, ki] * right, axis=[ko, ki])

    outer = -(-columns // panel) // (2 if form.strassen else 1)
    part = te.compute((outer, count, tiles, r, panel), term, name="product")

    def result(*i: tirx.Var) -> tirx.Expr:
        row, j = _ravelled(i[:-1], lead), i[-1]
        if not form.strassen:
            return part[j // panel, 0, row // r, row % r, j % panel]
        half = row // 2
        p = [part[j // (2 * panel), q, half // r, half % r, j % panel] for q in range(_PRODUCTS)]
        u2 = p[0] + p[5]
        u3, u4 = u2 + p[6], u2 + p[4]
        upper = tirx.Select(j // panel % 2 == 0, p[0] + p[1], u4 + p[2])
        lower = tirx.Select(j // panel % 2 == 0, u3 - p[3], u3 + p[4])
        return tirx.Select(row % 2 == 0, upper, lower)

    mark = {SPACE_MARK: KIND}
    return te.compute((*lead, columns), result, name="matmul", attrs=mark)


def _unravelled(row: tirx.Expr, lead: Sequence[int]) -> tuple[tirx.Expr, ...]:
    """Return the indices, along the axes `lead`, of row number `row`."""
    indices: list[tirx.Expr] = []
    for axis, extent in enumerate(lead):
        below = prod(lead[axis + 1 :])
        index = row if below == 1 else row // below
        if extent == 1:
            index = tirx.const(0, "int32")
        elif prod(lead[:axis]) > 1:
            index = index % extent
        indices.append(index)
    return tuple(indices)


def _ravelled(indices: Sequence[tirx.Var], lead: Sequence[int]) -> tirx.Expr:
    """Return the row number of indices along the axes `lead`."""
    row: tirx.Expr = indices[0]
    for index, extent in zip(indices[1:], lead[1:], strict=True):
        row = row * extent + index
    return row


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: panels are divided among cores; their products stay in the L1 cache until used."""
    part = sch.get_producers(block)[0]
    left = sch.get_producers(part)[0]
    epilogue = Epilogue.after(sch, block)
    sch.compute_inline(block)
    lanes = target.simd.lanes
    o, p, tile, i, j, ko, ki = sch.get_loops(part)
    count, panel, s = extents_of(sch, (p, j, ki))
    strassen = count > 1
    width = min(lanes, panel)
    unroll = choose("k", tuple(d for d in (1, 2, 4, 8, 16) if s % d == 0), min(4, s))

    *rows, columns = sch.get_loops(epilogue.block)
    row = sch.fuse(*rows)
    jo, half, jv, ji = sch.split(columns, [None, 2 if strassen else 1, panel // width, width])
    if strassen and extent_of(sch, row) % 2 == 0:
        row, pair = sch.split(row, [None, 2])
        sch.reorder(jo, row, jv, pair, half, ji)
        sch.unroll(pair)
    else:
        sch.reorder(jo, row, jv, half, ji)
    sch.compute_at(part, jo, preserve_unit_loops=True)
    sch.unroll(half)
    sch.vectorize(ji)

    o, p, tile, i, j, ko, ki = sch.get_loops(part)[1:]
    jt, jl = sch.split(j, [None, width])
    kio, kii = sch.split(ki, [None, unroll])
    sch.reorder(o, p, tile, ko, kio, kii, i, jt, jl)
    outermost = ko
    if multiplies_by_element(target):
        hold_operand(sch, part, kio)
        outermost = unroll_rounds(sch, ko)
    sch.vectorize(jl)
    unroll_all(sch, i, jt, kii)
    sch.parallel(jo)
    sch.decompose_reduction(part, outermost)

    q, t, k, i, v = sch.get_loops(left)
    sch.reorder(t, k, i, q, v)
    sch.unroll(q)
    sch.vectorize(v)
    sch.parallel(t)


def schedule_weights(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the sums of weights: panels are divided among cores."""
    del choose
    o, p, k, j = sch.get_loops(block)
    jo, ji = sch.split(j, [None, target.simd.lanes])
    sch.reorder(o, k, jo, p, ji)
    sch.unroll(p)
    sch.vectorize(ji)
    sch.parallel(o)
