"""Softmax along another axis than the last: a vector holds adjacent columns.

The tensor is seen as `[outer, axis, inner]`. One core computes a few vectors of `inner` from start to end,
each stage a pass along the axis, so that what it reads stays in the L1 cache.
"""

from __future__ import annotations

import math
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call

from builder.errors import UnsuitedError
from builder.kernels.decisions import Chooser
from builder.kernels.rewriter import shape_of
from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces import rows, vector_math
from builder.target.device_target import DeviceTarget

KIND: Final = "columns"
# Vectors of a job: enough for whole cache lines, few enough for the L1 cache.
_VECTORS: Final = 4


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
            flat,
            lambda o, a, i: vector_math.exp_of_negative(x[o, a, i] - top[o, i], smallest),
            name="power",
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


def schedule(sch: st.Schedule, last: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: every stage is computed inside the last block's loop over vectors of columns.

    Raises
    ------
    UnsuitedError
        If other blocks were fused that this space does not know.
    """
    del choose
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    *stages, last = blocks
    loops = sch.get_loops(last)
    if len(loops) != 3:
        raise UnsuitedError("expected columns of three axes, got an operator over others")
    outer, axis, inner = loops
    lanes, extent = target.simd.lanes, int(sch.get(inner).extent)
    width = next((n * lanes for n in range(_VECTORS, 0, -1) if extent % (n * lanes) == 0), extent)
    job, columns = sch.split(inner, [None, width])
    sch.reorder(outer, job, axis, columns)
    job = sch.fuse(outer, job)
    for block in reversed(stages):
        sch.compute_at(block, job, preserve_unit_loops=True)
    sch.parallel(job)
    for block in stages:
        rows.order_stage(sch, block, lanes)
    rows.vectorise(sch, columns, lanes)
