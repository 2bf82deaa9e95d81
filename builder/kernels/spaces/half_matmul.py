"""Products of float16 rows with constant float16 weights in panels, with sums in float32.

As in `matmul`, panels `[N/nb, K, nb]` are divided among cores, and a tile of `rows` rows x one panel is kept
in registers: the products of one chunk (`half_sums`), whose sums are added in float32.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import Values, constant_of, shape_of
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.half_sums import MOST
from builder.kernels.spaces.loops import extent_of, fact, longer, unroll_all, vectorise_all
from builder.kernels.spaces.matmul import best_rows, pack
from builder.kernels.spaces.register_tile import hold_operand, multiplies_by_element, tilings
from builder.kernels.spaces.tiled import most_rows, pop_rows
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
    if full == columns:
        return result
    return te.compute((*lead, columns), result, name="columns")


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`, the sums of chunks."""
    panel = int(fact(sch, block, "edge.panel"))
    width = min(panel, 2 * target.simd.lanes)
    products = sch.get_producers(block)[0]
    filled = sch.get_producers(products)
    epilogue = Epilogue.after(sch, block)
    *lead, j, chunk = sch.get_loops(block)
    i = pop_rows(sch, lead)
    count = extent_of(sch, i)
    options = tilings(count, 32)
    vectors = panel // width
    best = best_rows(count, options, vectors, most_rows(vectors, target, held=multiplies_by_element(target)))
    rows = choose("rows", options, best)
    io, ii = sch.split(i, [None, rows])
    jo, jt, ji = sch.split(j, [None, vectors, width])
    sch.reorder(jo, *lead, io, chunk, ii, jt, ji)
    epilogue.place(io, vector=width)
    sch.compute_at(products, chunk, preserve_unit_loops=True)
    *outer, n, k = sch.get_loops(products)[-(len(lead) + 4) :]
    long = longer(sch, outer)
    row = long[-1] if long else outer[0]
    nt, ni = sch.split(n, [None, width])
    ko, ki = sch.split(k, [None, _UNROLLED])
    sch.reorder(ko, ki, row, nt, ni)
    if multiplies_by_element(target):
        hold_operand(sch, products, ko)
    unroll_all(sch, ki, row, nt, ii, jt)
    vectorise_all(sch, ni, ji)
    sch.parallel(jo)
    sch.decompose_reduction(products, ko)
    sch.decompose_reduction(block, chunk)
    for other in filled:
        last = sch.get_loops(other)[-1]
        sch.vectorize(sch.split(last, [None, width])[1])
