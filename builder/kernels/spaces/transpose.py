"""Transposes that move the last axis: neighbours in the input are not neighbours in the result.

Each element of a vector of the result comes from a different cache line. Rows that share those lines are
computed one after the other, so that a line is used completely before it is evicted.
"""

from __future__ import annotations

from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.errors import UnsuitedError
from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import legalise_as_tvm, shape_of
from builder.kernels.spaces import fallback
from builder.kernels.spaces.loops import extent_of, fact
from builder.target.device_target import DeviceTarget

KIND: Final = "transpose"


def legalise(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise a permutation that moves the last axis; any other as TVM does."""
    rank = len(shape_of(call))
    axes = [int(a) for a in call.attrs.axes] if call.attrs.axes is not None else list(range(rank))[::-1]
    shape = shape_of(call)
    if not axes or axes[-1] == rank - 1 or shape[-1] == 1 or shape[axes.index(rank - 1)] == 1:
        return legalise_as_tvm(bb, call)

    def compute(x: te.Tensor) -> te.Tensor:
        def element(*i: tirx.Var) -> tirx.Expr:
            return x[tuple(i[axes.index(axis)] for axis in range(rank))]

        mark = {SPACE_MARK: KIND, "edge.axis": axes.index(rank - 1)}
        return te.compute(shape, element, name="transpose", attrs=mark)

    return bb.call_te(compute, call.args[0], primfunc_name_hint="transpose")


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: blocks of columns are divided among cores, and each is computed for all of its rows.

    Each result of a split is a block of its own with these loops, such as queries, keys and values that are
    transposed together; so is a long formula of some of the columns.

    Raises `UnsuitedError` if the result has another rank: channels that come last are packed by copies of
        whole vectors.
    """
    del choose
    axis, rank = int(fact(sch, block, "edge.axis")), len(sch.get_loops(block))
    fallback.inline(sch)
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    if any(len(sch.get_loops(each)) != rank for each in blocks):
        raise UnsuitedError("expected blocks of the transpose's rank, got others")
    for each in blocks:
        _order(sch, each, axis, target.simd.lanes)


def _order(sch: st.Schedule, block: SBlockRV, axis: int, lanes: int) -> None:
    """Order the loops of one result: its rows, along `axis`, inside blocks of columns."""
    *loops, columns = sch.get_loops(block)
    rows = loops.pop(axis)
    outer, vector = sch.split(columns, [None, min(lanes, extent_of(sch, columns))])
    sch.reorder(*loops, outer, rows, vector)
    sch.parallel(sch.fuse(*loops, outer))
    sch.vectorize(vector)
