"""Softmax, its logarithm and reductions along axes before the last: a vector holds adjacent columns.

The tensor is seen as `[outer, axis, inner]`. One core computes a few vectors of `inner` from start to end,
each stage a pass along the axis, so that what it reads stays in the L1 cache.
"""

from __future__ import annotations

import math
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.errors import UnsuitedError
from builder.kernels.decisions import NAN_MARK, SPACE_MARK, Chooser
from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces import rows, vector_math
from builder.kernels.spaces.loops import extent_of
from builder.target.device_target import DeviceTarget

KIND: Final = "columns"
# Vectors of a job: enough for whole cache lines, few enough for the L1 cache.
_VECTORS: Final = 4
# From this number of jobs on, the last one may have fewer columns than the others.
_FEW_JOBS: Final = 4
# With fewer columns, a reduction is no faster than along rows.
_FEWEST_COLUMNS: Final = 4


def softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise softmax of float32 along an axis before the last.

    Its stages are the maximum, the exponentials, their sum, and the quotients.
    """
    shape = shape_of(call)
    axis = int(call.attrs.axis) % len(shape)
    flat = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))

    def compute(x: te.Tensor) -> te.Tensor:
        outer, extent, inner = flat
        # A quotient by the sum, which is at most `extent`, must not be denormal.
        smallest = vector_math.SMALLEST + math.log(extent)
        k, m = te.reduce_axis((0, extent), "k"), te.reduce_axis((0, extent), "m")
        top = te.compute((outer, inner), lambda o, i: te.max(x[o, k, i], axis=k), name="top")
        power = te.compute(
            flat, lambda o, a, i: vector_math.exp_of_negative(x[o, a, i] - top[o, i], smallest), name="power"
        )
        total = te.compute((outer, inner), lambda o, i: te.sum(power[o, m, i], axis=m), name="total")
        one = tirx.const(1.0, "float32")
        inverse = te.compute((outer, inner), lambda o, i: one / total[o, i], name="inverse")
        return te.compute(
            flat, lambda o, a, i: power[o, a, i] * inverse[o, i], name="softmax", attrs={SPACE_MARK: KIND}
        )

    data = bb.emit(relax.op.reshape(call.args[0], flat))
    result = bb.emit(bb.call_te(compute, data, primfunc_name_hint="softmax"))
    return relax.op.reshape(result, shape)


def log_softmax(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise the logarithm of softmax of float32 along an axis before the last.

    Its stages are the maximum, the exponentials, their sum, and the differences to its logarithm.
    """
    shape = shape_of(call)
    axis = int(call.attrs.axis) % len(shape)
    flat = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))

    def compute(x: te.Tensor) -> te.Tensor:
        outer, extent, inner = flat
        k, m = te.reduce_axis((0, extent), "k"), te.reduce_axis((0, extent), "m")
        top = te.compute((outer, inner), lambda o, i: te.max(x[o, k, i], axis=k), name="top")
        power = te.compute(
            flat, lambda o, a, i: vector_math.exp_of_negative(x[o, a, i] - top[o, i]), name="power"
        )
        total = te.compute((outer, inner), lambda o, i: te.sum(power[o, m, i], axis=m), name="total")
        sum_log = te.compute((outer, inner), lambda o, i: te.log(total[o, i]), name="sum_log")
        return te.compute(
            flat,
            lambda o, a, i: x[o, a, i] - top[o, i] - sum_log[o, i],
            name="log_softmax",
            attrs={SPACE_MARK: KIND},
        )

    data = bb.emit(relax.op.reshape(call.args[0], flat))
    result = bb.emit(bb.call_te(compute, data, primfunc_name_hint="log_softmax"))
    return relax.op.reshape(result, shape)


def reduction(bb: relax.BlockBuilder, call: Call) -> relax.Expr | None:
    """Legalise a reduction of float32 along adjacent axes before the last; None for any other."""
    x, shape = call.args[0], shape_of(call.args[0])
    axes = sorted({int(a) % len(shape) for a in call.attrs.axis or ()})
    if not axes or axes != list(range(axes[0], axes[-1] + 1)) or str(call.ty.dtype) != "float32":
        return None
    name, extent = op_name(call), math.prod(shape[axes[0] : axes[-1] + 1])
    outer, inner = math.prod(shape[: axes[0]]), math.prod(shape[axes[-1] + 1 :])
    if inner < _FEWEST_COLUMNS or extent == 0:
        return None
    reducer, _ = rows.REDUCTIONS[name]

    def compute(x: te.Tensor) -> te.Tensor:
        k = te.reduce_axis((0, extent), "k")
        total = te.compute(
            (outer, inner), lambda o, i: reducer(x[o, k, i], axis=k), name="total", attrs={NAN_MARK: 1}
        )

        def element(o: tirx.Var, _: tirx.Var, i: tirx.Var) -> tirx.Expr:
            value = total[o, i]
            return value * tirx.const(1.0 / extent, "float32") if name == "relax.mean" else value

        return te.compute((outer, 1, inner), element, name="reduction", attrs={SPACE_MARK: KIND})

    data = bb.emit(relax.op.reshape(x, (outer, extent, inner)))
    result = bb.emit(bb.call_te(compute, data, primfunc_name_hint=name.removeprefix("relax.")))
    return relax.op.reshape(result, shape_of(call))


def place_of_extremum(bb: relax.BlockBuilder, call: Call) -> relax.Expr | None:
    """Legalise `argmax` and `argmin` of float32 along an axis before the last; None along any other.

    The extremum is found first, then the first place in a column that has it. A column of NaN may have none,
    and gets the place 0.
    """
    x, shape = call.args[0], shape_of(call.args[0])
    axis = None if call.attrs.axis is None else int(call.attrs.axis) % len(shape)
    if axis is None or str(x.ty.dtype) != "float32":
        return None
    outer, extent, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if inner < _FEWEST_COLUMNS or extent == 0:
        return None
    reducer = te.max if op_name(call) == "relax.argmax" else te.min

    def compute(x: te.Tensor) -> te.Tensor:
        k, m = te.reduce_axis((0, extent), "k"), te.reduce_axis((0, extent), "m")
        top = te.compute((outer, inner), lambda o, i: reducer(x[o, k, i], axis=k), name="top")
        nowhere = tirx.const(extent, "int32")

        def place(o: tirx.Var, i: tirx.Var) -> tirx.Expr:
            return te.min(tirx.Select(x[o, m, i] == top[o, i], m.var, nowhere), axis=m)

        first = te.compute((outer, inner), place, name="first")

        def element(o: tirx.Var, _: tirx.Var, i: tirx.Var) -> tirx.Expr:
            found = tirx.Select(first[o, i] < nowhere, first[o, i], tirx.const(0, "int32"))
            return found.astype(str(call.ty.dtype))

        return te.compute((outer, 1, inner), element, name="place", attrs={SPACE_MARK: KIND})

    data = bb.emit(relax.op.reshape(x, (outer, extent, inner)))
    result = bb.emit(bb.call_te(compute, data, primfunc_name_hint=op_name(call).removeprefix("relax.")))
    return relax.op.reshape(result, shape_of(call))


def schedule(sch: st.Schedule, last: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: every stage is computed inside the last block's loop over vectors of columns.

    Raises `UnsuitedError` if other blocks were fused that this space does not know.
    """
    del choose
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    *stages, last = blocks
    loops = sch.get_loops(last)
    if len(loops) != 3:
        raise UnsuitedError("expected columns of three axes, got an operator over others")
    outer, axis, inner = loops
    lanes, extent = target.simd.lanes, extent_of(sch, inner)
    ragged = extent if extent <= _FEW_JOBS * _VECTORS * lanes else _VECTORS * lanes
    width = next((n * lanes for n in range(_VECTORS, 0, -1) if extent % (n * lanes) == 0), ragged)
    job, columns = sch.split(inner, [None, width])
    sch.reorder(outer, job, axis, columns)
    job = sch.fuse(outer, job)
    for block in reversed(stages):
        sch.compute_at(block, job, preserve_unit_loops=True)
    sch.parallel(job)
    for block in stages:
        rows.order_stage(sch, block, lanes)
    rows.vectorise(sch, columns, lanes)
