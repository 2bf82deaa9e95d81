"""Operators on rows, that is on the last axis: softmax, its logarithm, layer norm, and reductions.

One core computes a row from start to end while it is in the L1 cache; each stage is a pass over
the row. A sum is kept as one partial sum for each lane of a vector, because LLVM may not reorder
floating-point additions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.errors import UnsuitedError
from builder.kernels.decisions import NAN_MARK, SPACE_MARK, Chooser
from builder.kernels.rewriter import legalise_as_tvm, op_name, shape_of
from builder.kernels.spaces import vector_math
from builder.kernels.spaces.fallback import is_cheap
from builder.kernels.spaces.loops import extent_of
from builder.target.device_target import DeviceTarget

KIND: Final = "rows"
_PARTS: Final = 16  # the most lanes of a vector
LOWEST: Final = -math.inf  # the identity of a maximum
_MARK: Final = {SPACE_MARK: KIND}
# Reductions over rows: the function of two elements, and its identity.
REDUCTIONS: Final[Mapping[str, tuple[Callable[..., tirx.Expr], float]]] = {
    "relax.mean": (te.sum, 0.0),
    "relax.sum": (te.sum, 0.0),
    "relax.max": (te.max, LOWEST),
    "relax.min": (te.min, -LOWEST),
}
# Reductions of a whole tensor that may be divided into parts, whose results are reduced again. A sum may not:
# it would be rounded differently.
_OF_PARTS: Final = ("relax.max", "relax.min")
_MOST_PARTS, _FEWEST_OF_A_PART = 64, 256


def softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise softmax: ours for float32 over the last axis, else TVM's; `columns` has the other axes.

    Its stages are the maximum, the exponentials, their sum, and the quotients.
    """
    if not _is_along_rows(call):
        return legalise_as_tvm(bb, call)

    def compute(x: te.Tensor) -> te.Tensor:
        rows = x.shape[:-1]
        top = reduced(x, te.max, LOWEST, "top")
        # A quotient by the sum, which is at most `columns`, must not be denormal.
        smallest = vector_math.SMALLEST + math.log(int(x.shape[-1]))

        def shifted(*i: tirx.Var) -> tirx.Expr:
            return vector_math.exp_of_negative(x(*i) - top(*i[:-1]), smallest)

        power = te.compute(x.shape, shifted, name="power")
        total = reduced(power, te.sum, 0.0, "total")
        one = tirx.const(1.0, "float32")
        inverse = te.compute(rows, lambda *i: one / total(*i), name="inverse")
        return te.compute(x.shape, lambda *i: power(*i) * inverse(*i[:-1]), name="softmax", attrs=_MARK)

    return bb.call_te(compute, call.args[0], primfunc_name_hint="softmax")


def log_softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise the logarithm of softmax: ours for float32 over the last axis, else TVM's.

    Its stages are the maximum, the exponentials, their sum, and the differences to its logarithm.
    """
    if not _is_along_rows(call):
        return legalise_as_tvm(bb, call)

    def compute(x: te.Tensor) -> te.Tensor:
        top = reduced(x, te.max, LOWEST, "top")
        power = te.compute(
            x.shape, lambda *i: vector_math.exp_of_negative(x(*i) - top(*i[:-1])), name="power"
        )
        total = reduced(power, te.sum, 0.0, "total")
        sum_log = te.compute(x.shape[:-1], lambda *i: te.log(total(*i)), name="sum_log")
        return te.compute(
            x.shape, lambda *i: x(*i) - top(*i[:-1]) - sum_log(*i[:-1]), name="log_softmax", attrs=_MARK
        )

    return bb.call_te(compute, call.args[0], primfunc_name_hint="log_softmax")


def _is_along_rows(call: Call) -> bool:
    last = len(shape_of(call)) - 1
    return int(call.attrs.axis) in (-1, last) and str(call.ty.dtype) == "float32"


def layer_norm(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise layer norm: ours for float32 over the last axes, which are one row, else TVM's.

    Its stages are the mean, the variance about it, and the normalised row.
    """
    shape = shape_of(call)
    axes = sorted(int(a) % len(shape) for a in call.attrs.axes)
    first = len(shape) - len(axes)
    if axes != list(range(first, len(shape))) or str(call.ty.dtype) != "float32":
        return legalise_as_tvm(bb, call)
    epsilon = float(call.attrs.epsilon)
    centred, scaled = bool(call.attrs.center), bool(call.attrs.scale)

    def compute(x: te.Tensor, gamma: te.Tensor, beta: te.Tensor) -> te.Tensor:
        *rows, columns = x.shape
        share = tirx.const(1.0 / int(columns), "float32")
        total = reduced(x, te.sum, 0.0, "total")
        mean = te.compute(rows, lambda *i: total(*i) * share, name="mean")

        def square(*i: tirx.Var) -> tirx.Expr:
            difference = x(*i) - mean(*i[:-1])
            return difference * difference

        squares = reduced(te.compute(x.shape, square, name="square"), te.sum, 0.0, "squares")
        inverse = te.compute(
            rows, lambda *i: tirx.rsqrt(squares(*i) * share + tirx.const(epsilon, "float32")), name="inverse"
        )

        def element(*i: tirx.Var) -> tirx.Expr:
            value = (x(*i) - mean(*i[:-1])) * inverse(*i[:-1])
            value = value * gamma[i[-1]] if scaled else value
            return value + beta[i[-1]] if centred else value

        return te.compute(x.shape, element, name="layer_norm", attrs=_MARK)

    if len(axes) == 1:
        return bb.call_te(compute, *call.args, primfunc_name_hint="layer_norm")
    count = math.prod(shape[first:])
    flat = [(*(shape[:first] or (1,)), count), (count,), (count,)]
    args = [bb.emit(relax.op.reshape(a, each)) for a, each in zip(call.args, flat, strict=True)]
    return relax.op.reshape(bb.emit(bb.call_te(compute, *args, primfunc_name_hint="layer_norm")), shape)


def reduction(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a reduction: ours for float32 over the last axes, which are one row, else TVM's."""
    x, shape = call.args[0], shape_of(call.args[0])
    given = call.attrs.axis
    axes = sorted(range(len(shape)) if given is None else {int(a) % len(shape) for a in given})
    first = len(shape) - len(axes)
    lead, columns = shape[:first] or (1,), math.prod(shape[first:])
    name = op_name(call)
    if axes != list(range(first, len(shape))) or str(call.ty.dtype) != "float32" or columns < _PARTS:
        is_extremum = name in _OF_PARTS and str(call.ty.dtype).startswith("float")
        return _extremum(bb, call, axes) if is_extremum else legalise_as_tvm(bb, call)
    if lead == (1,) and name in _OF_PARTS and (parts := _parts_of(columns)) > 1:
        x = bb.emit(relax.op.reshape(x, (parts, columns // parts)))
        lead, columns = (parts,), columns // parts
    reduced = _reduction(bb, x, name, lead, columns)
    if math.prod(lead) > math.prod(shape[:first]):
        reduced = _reduction(bb, reduced, name, (1,), lead[0])
    return relax.op.reshape(reduced, shape_of(call))


def _extremum(bb: relax.BlockBuilder, call: Call, axes: list[int]) -> relax.Expr:
    """Emit a maximum or minimum over any axes, without a design space."""
    reducer, _ = REDUCTIONS[op_name(call)]
    name = op_name(call).removeprefix("relax.")

    def compute(x: te.Tensor) -> te.Tensor:
        along = {axis: te.reduce_axis((0, x.shape[axis]), f"k{axis}") for axis in axes}
        kept = [axis for axis in range(len(x.shape)) if axis not in along]

        def element(*place: tirx.Var) -> tirx.Expr:
            at = along | dict(zip(kept, place, strict=True))
            return reducer(x[tuple(at[axis] for axis in range(len(x.shape)))], axis=list(along.values()))

        return te.compute([x.shape[axis] for axis in kept], element, name=name, attrs={NAN_MARK: 1})

    return relax.op.reshape(
        bb.emit(bb.call_te(compute, call.args[0], primfunc_name_hint=name)), shape_of(call)
    )


def _parts_of(count: int) -> int:
    """Return the number of parts that a single row is divided into, so that each core has several."""
    most = min(_MOST_PARTS, count // _FEWEST_OF_A_PART)
    return next((parts for parts in range(most, 1, -1) if count % parts == 0), 1)


def _reduction(
    bb: relax.BlockBuilder, x: relax.Expr, name: str, lead: tuple[int, ...], columns: int
) -> relax.Expr:
    """Emit the reduction `name` of `x`, seen as rows `[*lead, columns]`; its shape is `[*lead, 1]`."""
    reducer, identity = REDUCTIONS[name]

    def compute(rows: te.Tensor) -> te.Tensor:
        total = reduced(rows, reducer, identity, "total", {NAN_MARK: 1})

        def element(*i: tirx.Var) -> tirx.Expr:
            value = total(*i[:-1])
            return value * tirx.const(1.0 / columns, "float32") if name == "relax.mean" else value

        return te.compute((*lead, 1), element, name="reduction", attrs=_MARK)

    rows = x if shape_of(x) == (*lead, columns) else bb.emit(relax.op.reshape(x, (*lead, columns)))
    return bb.emit(bb.call_te(compute, rows, primfunc_name_hint=name.removeprefix("relax.")))


def reduced(
    x: te.Tensor,
    reducer: Callable[..., tirx.Expr],
    identity: float,
    name: str,
    attrs: Mapping[str, int] | None = None,
) -> te.Tensor:
    """Return the tensor expression of a reduction along the last axis, with attributes.

    The axis is completed to a multiple of `_PARTS`, so that it can be split into partial results.
    """
    *rows, columns = (int(d) for d in x.shape)
    full = columns if columns <= _PARTS else -(-columns // _PARTS) * _PARTS
    k = te.reduce_axis((0, full), "k")

    def element(*i: tirx.Var) -> tirx.Expr:
        value = x[(*i, k)]
        if full != columns:
            value = tirx.if_then_else(tirx.likely(k < columns), value, tirx.const(identity, x.dtype))
        return reducer(value, axis=k)

    return te.compute(rows, element, name=name, attrs=dict(attrs or {}))


def schedule(sch: st.Schedule, last: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: every stage is computed inside the last block's loop over rows.

    Raises `UnsuitedError` if there is a single row, which cannot be divided among cores.
    """
    del choose
    _inline_producers(sch)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if _is_reduction(sch, block):
            split_sum(sch, block, target.simd.lanes)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    *stages, last = blocks
    *rows, columns = sch.get_loops(last)
    if not rows:
        raise UnsuitedError("expected several rows, got one")
    row = sch.fuse(*rows)
    for block in reversed(stages):
        sch.compute_at(block, row, preserve_unit_loops=True)
    sch.parallel(row)
    vectorise(sch, columns, target.simd.lanes)
    for block in stages:
        order_stage(sch, block, target.simd.lanes)


def order_stage(sch: st.Schedule, block: SBlockRV, lanes: int) -> None:
    """Vectorise one pass, such as that over a row: along it, or across its partial sums."""
    axes = list(sch.get(block).iter_vars)
    loops = sch.get_loops(block)[-len(axes) :]
    long = [(loop, axis) for loop, axis in zip(loops, axes, strict=True) if extent_of(sch, loop) > 1]
    spatial = [loop for loop, axis in long if int(axis.iter_type) == tirx.IterVar.DataPar]
    reduction = [loop for loop, axis in long if int(axis.iter_type) == tirx.IterVar.CommReduce]
    if reduction:
        sch.reorder(*reduction, *spatial)
    if spatial:
        vectorise(sch, spatial[-1], lanes)
    if reduction:
        sch.decompose_reduction(block, reduction[0])


def _inline_producers(sch: st.Schedule) -> None:
    """Inline cheap element-wise blocks over whole rows that have one consumer."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        consumers = sch.get_consumers(block)
        if _is_reduction(sch, block) or len(consumers) != 1:
            continue
        if len(sch.get(block).iter_vars) >= len(sch.get(consumers[0]).iter_vars) and is_cheap(sch.get(block)):
            sch.compute_inline(block)


def _is_reduction(sch: st.Schedule, block: SBlockRV) -> bool:
    return any(int(v.iter_type) == tirx.IterVar.CommReduce for v in sch.get(block).iter_vars)


def split_sum(sch: st.Schedule, block: SBlockRV, lanes: int) -> SBlockRV | None:
    """Split a reduction into `lanes` partial ones and return their block, if that divides the row."""
    loop = sch.get_loops(block)[-1]
    extent = extent_of(sch, loop)
    if extent % lanes or extent == lanes:  # TVM's `rfactor` forgets the condition of an incomplete part
        return None
    _, lane = sch.split(loop, [None, lanes])
    return sch.rfactor(lane, len(sch.get(block).iter_vars) - 1)


def vectorise(sch: st.Schedule, loop: LoopRV, lanes: int) -> None:
    """Vectorise a loop, in vectors of `lanes` elements."""
    extent = extent_of(sch, loop)
    if extent > lanes:
        _, loop = sch.split(loop, [None, lanes])
    sch.vectorize(loop)
