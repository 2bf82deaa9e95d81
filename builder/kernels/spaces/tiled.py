"""Products with constant weights whose rows are packed too: in tiles, and by Strassen's algorithm.

Rows become `[K / s, rows of a tile, s]`, so that a register tile reads them one after the other. The last
tile is filled up by repeating the last row: any number of rows runs at the speed of a whole tile.

Where rows, depth and columns are many, two of each are taken as the four quarters of a product of 2 x 2
blocks, which takes seven products in place of eight (Strassen, "Gaussian elimination is not optimal", 1969;
here in Winograd's form with 15 additions). Rows alternate between the quarters, as panels do, so that what
belongs together stays close. Sums of weights are made by a node that reads constants alone, at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st

from builder.kernels.decisions import Chooser
from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, FUSES_NOTHING, Epilogue
from builder.kernels.spaces.operand import hold, multiplies_by_element, repeat
from builder.target.device_target import DeviceTarget

KIND: Final = "tiled_matmul"
WEIGHTS_KIND: Final = "strassen_weights"
_PRODUCTS: Final = 7


@dataclass(frozen=True, slots=True)
class Form:
    """How a product is computed.

    Attributes
    ----------
    rows
        Rows of a register tile.
    step
        Values of a row that lie side by side.
    strassen
        Whether by seven products of quarters.
    """

    rows: int
    step: int
    strassen: bool

    @classmethod
    def of(
        cls, lead: Sequence[int], depth: int, panels: int, panel: int, target: DeviceTarget
    ) -> Form | None:
        """The form that pays for rows counted as `lead`; None where they are best read as they are."""
        rows = prod(lead)
        lanes = target.simd.lanes
        vectors = -(-panel // lanes)
        element = multiplies_by_element(target)
        most = most_rows(vectors, target, held=element)
        halves = rows >= _MANY_ROWS and depth % (2 * lanes) == 0 and panels % 2 == 0
        strassen = halves and element and depth >= _MANY and panels * panel >= _MANY
        count = -(-rows // 2) if strassen else rows
        step = lanes if depth % (2 * lanes if strassen else lanes) == 0 else 1
        if not strassen:
            whole = max(r for r in range(1, most + 1) if whole_rows(lead) % r == 0)
            enough = whole >= min(rows, _FEW_ROWS)
            if step == 1 or most == 1 or rows < _FEW_ROWS or (enough and not element):
                return None
        sizes = range(min(_FEW_ROWS, most), most + 1)
        best = min(sizes, key=lambda r: (-(-count // r) * (r * vectors + vectors + r / 2), -r))
        return cls(best, step, strassen)


def whole_rows(lead: Sequence[int]) -> int:
    """How many rows may be cut into tiles that do not straddle an axis, where rows are counted as `lead`."""
    long = [extent for extent in lead if extent > 1]
    return long[-1] if long else 1


_FEW_ROWS: Final = 4
_MANY_ROWS, _MANY = 64, 256


def most_rows(vectors: int, target: DeviceTarget, *, held: bool) -> int:
    """Rows of accumulators, each so many vectors, that leave registers for the panel's row and for held rows.

    Without held rows a quarter of the registers is left: on 16 of them 4 rows x 3 vectors run at 99 % of the
    peak, 3 rows at 90 %, 2 at 68 %, and 5, which spill, at 57 %.
    """
    registers = target.simd.registers
    if held:
        return max(1, (registers - 1 - min(vectors, 2)) // (vectors + 1))
    return max(1, registers * 3 // 4 // vectors)


def emit(bb: relax.BlockBuilder, x: relax.Expr, packed: relax.Expr, form: Form) -> relax.Expr:
    """The product of `x` with a matrix in panels, [N / panel, K, panel]."""
    weights = packed
    if form.strassen:
        weights = bb.emit(
            bb.call_te(
                transform_weights,
                packed,
                primfunc_name_hint="strassen_weights",
                primfunc_attrs={"op_pattern": FUSES_NOTHING},
            )
        )
    columns = shape_of(packed)[0] * shape_of(packed)[2]
    call = bb.call_te(
        lambda a, b: product(a, b, columns, form),
        x,
        weights,
        primfunc_name_hint="matmul",
        primfunc_attrs={"op_pattern": FUSES_ELEMENTWISE},
    )
    return bb.emit(call)


def transform_weights(b: te.Tensor) -> te.Tensor:
    """`[N / panel, K, panel]` to the seven right factors, [N / panel / 2, 7, K / 2, panel]."""
    panels, depth, panel = (int(d) for d in b.shape)
    half = depth // 2

    def element(o: tirx.Var, p: tirx.Var, k: tirx.Var, j: tirx.Var) -> tirx.Expr:
        b11, b12 = b[2 * o, k, j], b[2 * o + 1, k, j]
        b21, b22 = b[2 * o, k + half, j], b[2 * o + 1, k + half, j]
        t1, t3 = b12 - b11, b22 - b12
        t2 = b22 - t1
        return _choose(p, (b11, b21, b22, t2 - b21, t1, t2, t3))

    shape = (panels // 2, _PRODUCTS, half, panel)
    return te.compute(shape, element, name="weights", attrs={"edge.space": WEIGHTS_KIND})


def _choose(index: tirx.Expr, values: Sequence[tirx.Expr]) -> tirx.Expr:
    """`values[index]`; the loop over `index` is unrolled, and one remains."""
    result = values[-1]
    for k in range(len(values) - 2, -1, -1):
        result = tirx.Select(index == k, values[k], result)
    return result


def product(a: te.Tensor, b: te.Tensor, columns: int, form: Form) -> te.Tensor:
    """Packed rows, products into a buffer for each panel, and the result from those."""
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

    outer = columns // panel // (2 if form.strassen else 1)
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

    mark = {"edge.space": KIND}
    return te.compute((*lead, columns), result, name="matmul", attrs=mark)


def _unravelled(row: tirx.Expr, lead: Sequence[int]) -> tuple[tirx.Expr, ...]:
    """The indices of row number `row`."""
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
    row: tirx.Expr = indices[0]
    for index, extent in zip(indices[1:], lead[1:], strict=True):
        row = row * extent + index
    return row


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Panels are divided among cores; a panel's products stay in the first cache until they are added up."""
    part = sch.get_producers(block)[0]
    left = sch.get_producers(part)[0]
    epilogue = Epilogue.after(sch, block)
    sch.compute_inline(block)
    lanes = target.simd.lanes
    o, p, tile, i, j, ko, ki = sch.get_loops(part)
    count, panel, s = (int(sch.get(loop).extent) for loop in (p, j, ki))
    strassen = count > 1
    width = min(lanes, panel)
    unroll = choose("k", tuple(d for d in (1, 2, 4, 8, 16) if s % d == 0), min(4, s))

    *rows, columns = sch.get_loops(epilogue.block)
    row = sch.fuse(*rows)
    jo, half, jv, ji = sch.split(columns, [None, 2 if strassen else 1, panel // width, width])
    if strassen and int(sch.get(row).extent) % 2 == 0:
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
        hold(sch, part, kio)
        outermost = repeat(sch, ko)
    sch.vectorize(jl)
    for loop in (i, jt, kii):
        sch.unroll(loop)
    sch.parallel(jo)
    sch.decompose_reduction(part, outermost)

    q, t, k, i, v = sch.get_loops(left)
    sch.reorder(t, k, i, q, v)
    sch.unroll(q)
    sch.vectorize(v)
    sch.parallel(t)


def schedule_weights(
    sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser
) -> None:
    """The load-time sums: panels are divided among cores."""
    del choose
    o, p, k, j = sch.get_loops(block)
    jo, ji = sch.split(j, [None, target.simd.lanes])
    sch.reorder(o, k, jo, p, ji)
    sch.unroll(p)
    sch.vectorize(ji)
    sch.parallel(o)
