"""Transposes that move the last axis: what is read side by side is not written side by side.

A vector of the result gathers its elements from as many lines of the cache. Rows that share those lines come
next to each other, so that a line is used up before another takes its place.
"""

from __future__ import annotations

from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call

from builder.kernels.decisions import Chooser
from builder.kernels.rewriter import shape_of
from builder.kernels.spaces import fallback
from builder.target.device_target import DeviceTarget

KIND: Final = "transpose"


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """A permutation that moves the last axis, with a mark; any other as TVM has it."""
    rank = len(shape_of(call))
    axes = [int(a) for a in call.attrs.axes] if call.attrs.axes is not None else list(range(rank))[::-1]
    shape = shape_of(call)
    if not axes or axes[-1] == rank - 1 or shape[-1] == 1 or shape[axes.index(rank - 1)] == 1:
        default = call.op.get_attr("FLegalize")
        result: relax.Expr = default(bb, call)
        return result

    def compute(x: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            return x[tuple(i[axes.index(axis)] for axis in range(rank))]

        mark = {"edge.space": KIND, "edge.axis": axes.index(rank - 1)}
        return te.compute(shape, element, name="transpose", attrs=mark)

    return bb.call_te(compute, call.args[0], primfunc_name_hint="transpose")


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Blocks of columns are divided among cores; each is done for all of its rows."""
    del choose
    axis, rank = int(sch.get(block).annotations["edge.axis"]), len(sch.get_loops(block))
    fallback.inline(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    if len(blocks) != 1 or len(sch.get_loops(blocks[0])) != rank:
        raise st.ScheduleError("more than a transpose and what is done to each element")
    *loops, columns = sch.get_loops(blocks[0])
    rows = loops.pop(axis)
    lanes = target.simd.lanes
    outer, vector = sch.split(columns, [None, min(lanes, int(sch.get(columns).extent))])
    sch.reorder(*loops, outer, rows, vector)
    sch.parallel(sch.fuse(*loops, outer))
    sch.vectorize(vector)
