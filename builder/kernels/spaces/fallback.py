"""The schedule of functions without a design space. It never fails.

Element-wise blocks are inlined unless that repeats expensive work. The outer spatial loops of each remaining
block are fused and divided among the cores, and its innermost contiguous loop is vectorised. A block that
moves elements is computed row by row, so that what depends only on the row is computed once. If a block does
not allow a step, the step is skipped for that block only, so a loop nest stays serial only if it cannot be
parallel.
"""

from __future__ import annotations

import math
from typing import Final

import tvm
import tvm_ffi
from tvm import s_tir as st
from tvm import sym, tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.rewriter import op_name
from builder.kernels.spaces.loops import extents_of
from builder.kernels.spaces.quantisation import is_look_up
from builder.target.device_target import DeviceTarget


def schedule(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """Order the loops of `func`: parallel and vectorised as far as its blocks allow."""
    sch = st.Schedule(func)
    inline(sch)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        for attempt in (_order, _parallel_only):
            trial = sch.copy()
            try:
                attempt(trial, trial.get_sblock(sch.get(block).name_hint), target)
            except (st.ScheduleError, tvm.error.InternalError, RuntimeError, ValueError):
                continue
            sch = trial
            break
    return sch.mod["main"]


_EXPENSIVE: Final = {
    f"tirx.{n}" for n in ("exp", "erf", "tanh", "log", "pow", "sin", "cos", "sigmoid", "call_extern")
}

_LONG: Final = 4  # vectors in a row that is worth loops of its own
_NARROW: Final = (4, 8)  # channels of a block that is less than a vector

_CHEAP_PRODUCTS: Final = 4  # a polynomial that approximates exp or erf has more


def is_cheap(block: tirx.Stmt) -> bool:
    """Whether it costs no more to compute an element of the block again than to store and read it."""
    calls: list[Call] = []
    products: list[tirx.Mul] = []
    tvm_ffi.structural_walk(block.body, (Call, calls.append))
    tvm_ffi.structural_walk(block.body, ((tirx.Mul, tirx.Div), products.append))
    expensive = any(op_name(call) in _EXPENSIVE for call in calls)
    return not expensive and len(products) <= _CHEAP_PRODUCTS


def _branches(block: tirx.Stmt) -> bool:
    """Whether the block branches for each element, and so is not vectorised."""
    calls: list[Call] = []
    tvm_ffi.structural_walk(block.body, (Call, calls.append))
    return any(op_name(call) == "prim.if_then_else" for call in calls)


def inline(sch: st.Schedule) -> None:
    """Inline element-wise blocks into their consumers, unless that repeats an expensive computation."""
    changed = True
    while changed:
        changed = False
        for block in sch.get_child_blocks(sch.get_sblock("root")):
            consumers = sch.get_consumers(block)
            if not consumers:
                continue
            stmt = sch.get(block)
            if any(int(v.iter_type) != tirx.IterVar.DataPar for v in stmt.iter_vars):
                continue
            into_reduction = any(
                int(v.iter_type) != tirx.IterVar.DataPar for c in consumers for v in sch.get(c).iter_vars
            )
            into_branches = any(_branches(sch.get(c)) for c in consumers)
            if not is_cheap(stmt) and (len(consumers) > 1 or into_reduction or into_branches):
                continue
            try:
                sch.compute_inline(block)
            except (st.ScheduleError, tvm.error.InternalError, RuntimeError):
                continue
            changed = True
            break


def _split_axes(sch: st.Schedule, block: SBlockRV) -> tuple[list[object], list[object]]:
    """Return the loops of a block's spatial axes, and those of its reduction axes.

    Raises `ScheduleError` if loops and axes do not correspond one to one, or an axis is neither.
    """
    spatial, reduction = [], []
    loops = sch.get_loops(block)
    stmt = sch.get(block)
    if len(loops) != len(stmt.iter_vars):
        raise st.ScheduleError(f"expected {len(stmt.iter_vars)} loops, one for each axis, got {len(loops)}")
    for loop, axis in zip(loops, stmt.iter_vars, strict=True):
        if int(axis.iter_type) == tirx.IterVar.DataPar:
            spatial.append(loop)
        elif int(axis.iter_type) == tirx.IterVar.CommReduce:
            reduction.append(loop)
        else:
            raise st.ScheduleError("expected spatial and reduction axes, got another kind")
    return spatial, reduction


def _order(sch: st.Schedule, block: SBlockRV, target: DeviceTarget) -> None:
    """Divide a block's outer loops among the cores, and vectorise its last axis."""
    spatial, reduction = _split_axes(sch, block)
    if not spatial:
        return
    lanes = target.simd.lanes
    extents = extents_of(sch, spatial)
    elements = math.prod(extents)
    inner = spatial[-1]
    if reduction:
        if extents[-1] >= lanes:
            sch.reorder(*spatial[:-1], *reduction, inner)
            outer, vector = sch.split(inner, [None, lanes * 4 if extents[-1] % (lanes * 4) == 0 else lanes])
            sch.reorder(*spatial[:-1], outer, *reduction, vector)
            parallel = sch.fuse(*spatial[:-1], outer)
            sch.vectorize(vector)
        else:
            sch.reorder(*spatial, *reduction)
            parallel = sch.fuse(*spatial)
        sch.parallel(parallel)
        sch.decompose_reduction(block, reduction[0])
        return
    is_row = extents[-1] >= lanes or extents[-1] in _NARROW
    if is_row and len(spatial) > 1 and not _is_straight(sch.get(block), _LONG * lanes):
        sch.parallel(sch.fuse(*spatial[: _for_jobs(extents[:-1], target.cores * 4)]))
        if _reads_rows(sch.get(block)):
            sch.vectorize(sch.split(inner, [None, min(lanes, extents[-1])])[1])
        return
    fused = sch.fuse(*spatial)
    if elements < lanes:
        return
    chunk = lanes * 4 if elements % (lanes * 4) == 0 else lanes
    jobs = target.cores * 4
    outer, _, vector = sch.split(fused, [None, _vectors_per_job(elements, chunk, jobs), chunk])
    sch.parallel(outer)
    sch.vectorize(vector)


def _is_straight(block: tirx.Stmt, long: int) -> bool:
    """Whether each element is computed from the elements at its own place, or from broadcast ones.

    A number that is broadcast to a row of `long` elements or more counts as another place: it is read once if
    the row is computed as one.
    """
    axes = [axis.var for axis in block.iter_vars]
    is_long = int(block.iter_vars[-1].dom.extent) >= long
    for load in _loads(block):
        own = axes[len(axes) - len(load.indices) :]
        fixed = [isinstance(index, tirx.IntImm) for index in load.indices]
        if len(own) != len(fixed) or not all(
            is_fixed or index.same_as(axis)
            for index, axis, is_fixed in zip(load.indices, own, fixed, strict=True)
        ):
            return False
        if is_long and fixed and fixed[-1] and not all(fixed):
            return False
    return True


def _reads_rows(block: tirx.Stmt) -> bool:
    """Whether neighbours along the last axis are computed from neighbours, or from the same elements.

    A condition may choose for a whole row, as in padding, but not for each element.
    """
    last = block.iter_vars[-1].var
    calls: list[Call] = []
    tvm_ffi.structural_walk(block.body, (Call, calls.append))
    tests = [call.args[0] for call in calls if op_name(call) == "prim.if_then_else"]
    return all(last not in tirx.analysis.undefined_vars(test) for test in tests) and all(
        last not in tirx.analysis.undefined_vars(index) or _is_shifted(index, last)
        for load in _loads(block)
        for index in load.indices
    )


def _is_shifted(index: tirx.Expr, axis: tirx.Var) -> bool:
    parts = sym.detect_linear_equation(index, [axis])
    return bool(parts) and isinstance(parts[0], tirx.IntImm) and int(parts[0]) == 1


def _loads(block: tirx.Stmt) -> list[TensorLoad]:
    """Return what a block reads, but for tables of bytes, whose elements may be read in any order."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(block.body, (TensorLoad, loads.append))
    return [load for load in loads if not is_look_up(load)]


def _for_jobs(extents: list[int], jobs: int) -> int:
    """Return how many of the outer loops give enough jobs; what is inside them is computed once for each."""
    return next((n for n in range(1, len(extents)) if math.prod(extents[:n]) >= jobs), len(extents))


def _vectors_per_job(elements: int, chunk: int, jobs: int) -> int:
    """Divide `elements`, in vectors of `chunk`, into about `jobs` jobs, without a remainder if possible."""
    vectors = -(-elements // chunk)
    most = max(1, vectors // jobs)
    return next((m for m in range(most, most // 2, -1) if vectors % m == 0), most)


def _parallel_only(sch: st.Schedule, block: SBlockRV, target: DeviceTarget) -> None:
    """Divide a block's first axis among the cores."""
    del target
    spatial, _ = _split_axes(sch, block)
    sch.parallel(spatial[0])
