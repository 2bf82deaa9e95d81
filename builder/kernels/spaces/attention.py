"""Attention as one kernel: the scores of some queries, their softmax, and the products with the values.

The scores of a whole sequence are its length squared. For 1500 steps and 6 heads they are 54 MB, which
separate kernels write to memory and read again. Here one core computes a few queries from start to end, and
their scores with all keys stay in its L2 cache. A row is divided by the sum of its exponentials last, after
the product with the values, where it is shorter. A row has all keys, so no sum has to be scaled again.

Keys become panels, `[keys / panel, depth, panel]`, once for each head. What stands between the scores and
their softmax, such as a scale or a mask, is computed with the scores.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.calls.spans import Names, TracingBuilder, names_of, span_of
from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import Values, constant_of, op_name, shape_of
from builder.kernels.spaces import rows as rows_space
from builder.kernels.spaces import vector_math
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.fallback import is_cheap
from builder.kernels.spaces.loops import extents_of, fact, unroll_all
from builder.kernels.spaces.matmul import best_rows
from builder.kernels.spaces.matrix_view import MatrixView
from builder.kernels.spaces.register_tile import hold_operand, multiplies_by_element, tilings
from builder.kernels.spaces.tiled import most_rows
from builder.target.device_target import DeviceTarget

KIND: Final = "attention"
# What may stand between the scores and their softmax.
_STEPS: Final[Mapping[str, Callable[..., tirx.Expr]]] = {
    "relax.add": operator.add,
    "relax.subtract": operator.sub,
    "relax.multiply": operator.mul,
    "relax.divide": operator.truediv,
    "relax.maximum": tirx.max,
    "relax.minimum": tirx.min,
    "relax.where": tirx.Select,
    "relax.tanh": tirx.tanh,
}
_LEAST_RANK: Final = 2
# Keys whose values are multiplied before the next ones: those of a head stay in the L1 cache meanwhile.
_KEYS_AT_ONCE: Final = 256
_UNROLLED: Final = 4  # steps of a reduction
# With vectors of so many elements, one kernel is never slower. With shorter ones, it takes more instructions
# than separate kernels (a ninth more for a BERT with 128 tokens), which only less traffic makes up for.
_WIDE: Final = 16
_MOST_CACHED: Final = 2  # scores over the L2 cache that still count as cached


def pays(shape: Sequence[int], target: DeviceTarget) -> bool:
    """Whether one kernel is faster than separate ones.

    `shape`: of the scores.
    """
    cached = _MOST_CACHED * target.core.l2_bytes * target.core.l2_cores
    return target.simd.lanes >= _WIDE or 4 * prod(shape) > cached


@dataclass(frozen=True, slots=True)
class Step:
    """An operator between the scores and their softmax.

    `compute`: what it does with elements.
    `place`: which operand the scores are.
    """

    compute: Callable[..., tirx.Expr]
    place: int
    others: tuple[relax.Expr, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax of scores, times values.

    `queries`, `keys`, `values`: `[..., queries, depth]`, `[..., depth, keys]` and `[..., keys, columns]`.
    `steps`: what is done with the scores before their softmax.
    `shape`: of the scores.
    `columns`: of the values.
    `nodes`: the nodes of the model that are computed.
    """

    queries: MatrixView
    keys: MatrixView
    values: MatrixView
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    columns: int
    nodes: Names
    target: DeviceTarget

    @classmethod
    def of(
        cls,
        table: Values,
        call: Call,
        bound: Mapping[relax.Expr, Call],
        users: Mapping[relax.Var, int],
        target: DeviceTarget,
    ) -> Attention | None:
        """Return the attention that ends in the product `call`, None if it is another product.

        `call`: the product of a softmax and values.
        `bound`, `users`: what old variables are bound to, and how often each is read: one with other readers
            is not fused.
        """
        weights, values = call.args
        softmax = bound.get(weights)
        if softmax is None or op_name(softmax) != "relax.nn.softmax" or users.get(weights) != 1:
            return None
        shape, rank = shape_of(weights), len(shape_of(weights))
        if int(softmax.attrs.axis) not in (-1, rank - 1) or str(call.ty.dtype) != "float32":
            return None
        if not pays(shape, target):
            return None
        found = _scores(table, softmax.args[0], bound, users)
        if found is None or rank < _LEAST_RANK or shape[-2] == 1:
            return None
        product, steps = found
        for operand in (*product.args, values):
            lead = shape_of(operand)[:-2]
            if len(lead) != rank - 2 or any(a not in (1, b) for a, b in zip(lead, shape, strict=False)):
                return None
        queries, keys = product.args
        nodes = tuple(
            name for part in (product, *(c for c, _ in steps), softmax, call) for name in names_of(part)
        )
        return cls(
            MatrixView.of(table, queries, turned=False),
            MatrixView.of(table, keys, turned=True),
            MatrixView.of(table, values, turned=False),
            tuple(step for _, step in steps),
            shape,
            shape_of(values)[-1],
            nodes,
            target,
        )

    def emit(self, bb: TracingBuilder, order: Sequence[int] | None = None) -> relax.Expr:
        """Emit the kernel; its result is stored as if it were transposed.

        `order`: the axes of the transpose, of which the last one stays in place; None for no transpose.
        """
        views = (self.queries, self.keys, self.values)
        operands = [view.tensor for view in views]
        numbers: list[list[tirx.Expr | int]] = []  # for each step: numbers, or places among the operands
        for step in self.steps:
            numbers.append([])
            for other in step.others:
                value = constant_of(other)
                if value is not None and value.size == 1 and value.ndim <= len(self.shape):
                    numbers[-1].append(tirx.const(value.item(), str(other.ty.dtype)))
                else:
                    numbers[-1].append(len(operands))
                    operands.append(other)

        def compute(*tensors: te.Tensor) -> te.Tensor:
            def masked(score: tirx.Expr, *i: tirx.Var) -> tirx.Expr:
                for step, given in zip(self.steps, numbers, strict=True):
                    arguments = [_broadcast(tensors[n], i) if isinstance(n, int) else n for n in given]
                    arguments.insert(step.place, score)
                    score = step.compute(*arguments)
                return score

            return self._expression(tensors, masked, list(order or range(len(self.shape))))

        reader, bb.current = bb.current, span_of(self.nodes) or bb.current
        result = emit_kernel(bb, KIND, compute, *operands)
        bb.current = reader
        return result

    def _expression(
        self, tensors: Sequence[te.Tensor], masked: Callable[..., tirx.Expr], order: Sequence[int]
    ) -> te.Tensor:
        """Return the tensor expression of queries, keys and values, the first three of `tensors`."""
        q, k, v = tensors[:3]
        *lead, rows, keys = self.shape
        rank = len(self.shape)
        depth = self.queries.extents(rank)[-1]
        lanes = self.target.simd.lanes
        full, panel = -(-keys // lanes) * lanes, lanes * _vectors(-(-keys // lanes), self.target)
        panels = -(-full // panel)
        own = self.keys.extents(rank - 2)

        def key(*i: tirx.Var) -> tirx.Expr:
            *at, p, d, j = i
            column = p * panel + j
            value = self.keys.at(k, at, d, column)
            if panels * panel == keys:
                return value
            return tirx.if_then_else(tirx.likely(column < keys), value, tirx.const(0.0, "float32"))

        packed = te.compute((*own, panels, depth, panel), key, name="keys")
        d = te.reduce_axis((0, depth), "d")

        def score(*i: tirx.Var) -> tirx.Expr:
            *at, row, j = i
            head = [tirx.const(0, "int32") if extent == 1 else n for n, extent in zip(at, own, strict=True)]
            left = self.queries.at(q, at, row, d)
            return te.sum(left * packed[(*head, j // panel, d, j % panel)], axis=d)

        scores = te.compute((*lead, rows, full), score, name="scores")
        logits = te.compute((*lead, rows, keys), lambda *i: masked(scores(*i), *i), name="masked")
        top = rows_space.reduced(logits, te.max, rows_space.LOWEST, "top")
        power = te.compute(
            logits.shape, lambda *i: vector_math.exp_of_negative(logits(*i) - top(*i[:-1])), name="power"
        )
        total = rows_space.reduced(power, te.sum, 0.0, "total")
        n = te.reduce_axis((0, keys), "n")
        product = te.compute(
            (*lead, rows, self.columns),
            lambda *i: te.sum(power[(*i[:-1], n)] * self.values.at(v, i[:-2], n, i[-1]), axis=n),
            name="product",
        )
        one = tirx.const(1.0, "float32")

        def element(*i: tirx.Var) -> tirx.Expr:
            *at, column = (i[order.index(axis)] for axis in range(rank))
            return product[(*at, column)] * (one / total(*at))

        sizes = (*lead, rows, self.columns)
        shape = [sizes[axis] for axis in order]
        row = order.index(rank - 2)
        marks = {SPACE_MARK: KIND, "edge.row": row, "edge.keys": keys}
        return te.compute(shape, element, name="attention", attrs=marks)


def _scores(
    table: Values, expr: relax.Expr, bound: Mapping[relax.Expr, Call], users: Mapping[relax.Var, int]
) -> tuple[Call, list[tuple[Call, Step]]] | None:
    """Return the product that `expr` is computed from, and the steps from it to `expr`; None if none is."""
    call = bound.get(expr)
    if call is None or users.get(expr) != 1 or str(expr.ty.dtype) != "float32":
        return None
    if op_name(call) == "relax.matmul":
        return call, []
    if op_name(call) not in _STEPS:
        return None
    for place, argument in enumerate(call.args):
        if isinstance(argument, relax.Var) and shape_of(argument) == shape_of(expr):
            found = _scores(table, argument, bound, users)
            if found is not None:
                others = tuple(table.plain(other) for other in call.args if not other.same_as(argument))
                step = Step(_STEPS[op_name(call)], place, others)
                return found[0], [*found[1], (call, step)]
    return None


def order_of(call: Call) -> list[int] | None:
    """Return the axes of a transpose that leaves the last one in place, None for another one."""
    axes = [] if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    return axes if axes and axes[-1] == len(axes) - 1 else None


def _broadcast(tensor: te.Tensor, indices: Sequence[tirx.Var]) -> tirx.Expr:
    """Return an element of a tensor that is broadcast to the scores."""
    own = indices[len(indices) - len(tensor.shape) :]
    zero = tirx.const(0, "int32")
    return tensor(*(zero if int(n) == 1 else i for i, n in zip(own, tensor.shape, strict=True)))


def _vectors(count: int, target: DeviceTarget) -> int:
    """Return how many vectors of keys a panel has."""
    counts = (2, 3, 1) if multiplies_by_element(target) else (3, 2, 1)
    return min(counts, key=lambda c: -(-count // c) * (c + 1))


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """The sizes of tiles.

    `rows`: queries that a core computes from start to end.
    `scores`, `product`: queries of the register tiles of the two products.
    `vectors`: vectors of values in a register tile.
    `keys`: keys whose values are multiplied before the next ones.
    """

    rows: int
    scores: int
    product: int
    vectors: int
    keys: int


def tiles_of(heads: int, rows: int, keys: int, columns: int, target: DeviceTarget) -> AttentionTiles:
    """Return the heuristic's tiles.

    `heads`: matrices of all batches.
    `rows`, `keys`, `columns`: queries, keys, and columns of the values.
    """
    lanes, held = target.simd.lanes, multiplies_by_element(target)
    options = tilings(rows, 32)

    def tile(vectors: int) -> int:
        return best_rows(rows, options, vectors, most_rows(vectors, target, held=held))

    count = -(-columns // lanes)
    counts = (4, 3, 2, 1) if target.simd.registers >= 32 else (3, 2, 1)
    vectors = min(counts, key=lambda c: (-(-count // c) * (c + tile(c)) / tile(c), -c))
    scores = tile(_vectors(-(-keys // lanes), target))
    # The scores, and their exponentials.
    most = max(scores, target.core.l2_bytes // 2 // (8 * keys))
    jobs = max(1, -(-_JOBS * target.cores // heads))
    share = min(most, -(-rows // jobs))
    # Divided evenly: a last part of a few rows costs as much as a whole one.
    divided = 1 if share >= rows else -(-rows // max(scores, share // scores * scores))
    whole = -(-rows // (divided * scores)) * scores
    parts = -(-keys // _KEYS_AT_ONCE)
    together = -(-keys // parts)
    return AttentionTiles(
        min(whole, rows), scores, min(tile(vectors), whole), vectors, -(-together // _UNROLLED) * _UNROLLED
    )


_JOBS: Final = 4  # for each core: cores may be unequal


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: heads and parts of the queries are divided among cores, and each is computed whole."""
    del choose
    lanes = target.simd.lanes
    final = _producers(sch, block)
    product, total = final["product"], final["total"]
    power = _producers(sch, total)["power"]
    before = _producers(sch, power)
    top, masked = before["top"], before["masked"]
    (scores,) = sch.get_producers(masked)
    (packed,) = sch.get_producers(scores)
    epilogue = Epilogue.after(sch, block)
    axis, keys = int(fact(sch, block, "edge.row")), int(fact(sch, block, "edge.keys"))
    sch.compute_inline(block)
    tops, totals = (rows_space.split_sum(sch, part, lanes) for part in (top, total))

    *batch, c = sch.get_loops(epilogue.block)
    i = batch.pop(axis)
    rows, columns = extents_of(sch, (i, c))
    tiles = tiles_of(prod(extents_of(sch, batch)), rows, keys, columns, target)
    io, ii = sch.split(i, [None, tiles.rows])
    sch.reorder(*batch, io, ii, c)
    outer = sch.fuse(*batch, io)
    rows_space.vectorise(sch, c, lanes)

    sch.compute_at(product, outer, preserve_unit_loops=True)
    of_product = _order_product(sch, product, tiles, min(lanes, columns), target)
    sch.compute_at(total, outer, preserve_unit_loops=True)
    each, (summed,) = _axes(sch, total)
    sch.reorder(*each, summed)
    if totals is not None:
        sch.compute_at(totals, each[-1], preserve_unit_loops=True)
    sch.compute_at(power, outer, preserve_unit_loops=True)
    *_, row, column = sch.get_loops(power)
    rows_space.vectorise(sch, column, lanes)
    stages = [part for part in (top, tops) if part is not None]
    for part in stages:
        sch.compute_at(part, row, preserve_unit_loops=True)
    sch.compute_at(masked, outer, preserve_unit_loops=True)
    of_scores = _order_scores(sch, masked, scores, tiles.scores, target)

    sch.parallel(outer)
    for part in (*stages, totals):
        if part is not None:
            rows_space.order_stage(sch, part, lanes)
    for part, reduction in ((total, summed), (product, of_product), (scores, of_scores)):
        sch.decompose_reduction(part, reduction)
    *lead, _, n = sch.get_loops(packed)
    sch.vectorize(sch.split(n, [None, lanes])[1])
    sch.parallel(sch.fuse(*lead))


def _order_product(
    sch: st.Schedule, product: SBlockRV, tiles: AttentionTiles, width: int, target: DeviceTarget
) -> LoopRV:
    """Order the loops of the product with the values, and return the outermost one of its reduction."""
    (*_, i, c), (n,) = _axes(sch, product)
    i1, i0 = sch.split(i, [None, tiles.product])
    co, ct, cl = sch.split(c, [None, tiles.vectors, width])
    nb, no, ni = sch.split(n, [None, tiles.keys // _UNROLLED, _UNROLLED])
    sch.reorder(nb, i1, co, no, ni, i0, ct, cl)
    if multiplies_by_element(target):
        hold_operand(sch, product, no)
    sch.vectorize(cl)
    unroll_all(sch, ni, i0, ct)
    return nb


def _order_scores(
    sch: st.Schedule, masked: SBlockRV, scores: SBlockRV, rows: int, target: DeviceTarget
) -> LoopRV:
    """Order the loops of the scores, and of what is done to them: tiles of `rows` queries.

    Result: the outermost loop of the reduction.
    """
    lanes = target.simd.lanes
    *_, i, n = sch.get_loops(masked)
    (packed,) = sch.get_producers(scores)
    panel = int(sch.get(packed).writes[0].source.shape[-1])
    i1, i0 = sch.split(i, [None, rows])
    no, nt, nl = sch.split(n, [None, panel // lanes, lanes])
    sch.reorder(no, i1, i0, nt, nl)
    sch.compute_at(scores, i1, preserve_unit_loops=True)
    sch.vectorize(nl)
    if is_cheap(sch.get(masked)):
        unroll_all(sch, i0, nt)
    (*_, i, n), (d,) = _axes(sch, scores)
    nt, nl = sch.split(n, [None, lanes])
    do, di = sch.split(d, [None, _UNROLLED])
    sch.reorder(do, di, i, nt, nl)
    if multiplies_by_element(target):
        hold_operand(sch, scores, do)
    sch.vectorize(nl)
    unroll_all(sch, di, i, nt)
    return do


def _axes(sch: st.Schedule, block: SBlockRV) -> tuple[list[LoopRV], list[LoopRV]]:
    """Return the innermost loops of a block, one for each axis: those of the result, and of the reduction."""
    axes = list(sch.get(block).iter_vars)
    loops = list(zip(sch.get_loops(block)[-len(axes) :], axes, strict=True))
    spatial = [loop for loop, axis in loops if int(axis.iter_type) == tirx.IterVar.DataPar]
    return spatial, [loop for loop, axis in loops if int(axis.iter_type) == tirx.IterVar.CommReduce]


def _producers(sch: st.Schedule, block: SBlockRV) -> Mapping[str, SBlockRV]:
    """Return the blocks that a block reads, by their names."""
    return {str(sch.get(part).name_hint): part for part in sch.get_producers(block)}
