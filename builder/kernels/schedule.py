"""Hands each function to the design space of its anchor, and to the fallback where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import tvm
import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.s_tir.schedule import Trace

from builder.kernels.decisions import UNTUNED, Chooser, Schedules, Shipped
from builder.kernels.finish import finish
from builder.kernels.signature import signature_of
from builder.kernels.spaces import (
    convolution,
    depthwise,
    fallback,
    matmul,
    pooling,
    rows,
    tiled,
    transpose,
    winograd,
)
from builder.target.device_target import DeviceTarget

Schedule = Callable[[st.Schedule, st.schedule.SBlockRV, DeviceTarget, Chooser], None]

SPACES: Mapping[str, Schedule] = {
    convolution.KIND: convolution.schedule,
    depthwise.KIND: depthwise.schedule,
    matmul.KIND: matmul.schedule,
    matmul.BATCHED: matmul.schedule_batched,
    pooling.KIND: pooling.schedule,
    rows.KIND: rows.schedule,
    tiled.KIND: tiled.schedule,
    tiled.WEIGHTS_KIND: tiled.schedule_weights,
    transpose.KIND: transpose.schedule,
    winograd.KIND: winograd.schedule,
    winograd.WEIGHTS_KIND: winograd.schedule_weights,
}

SCHEDULE: Final = "edge.schedule"  # a kernel's attribute: the design space its loops come from
# A function of odd shape, without axes or elements, may end a design space by any of the last four.
SCHEDULE_FAULTS: Final = (
    st.ScheduleError,
    tvm.error.InternalError,
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    ZeroDivisionError,
)


def schedule(func: tirx.PrimFunc, target: DeviceTarget, schedules: Schedules = UNTUNED) -> tirx.PrimFunc:
    """`func` with its loops ordered for `target`.

    Parameters
    ----------
    func
        An unscheduled function.
    target
        The device.
    schedules
        Where the order of the loops comes from.
    """
    func = without_pragmas(func)
    return finish(_ordered(func, target, schedules), target)


def _ordered(func: tirx.PrimFunc, target: DeviceTarget, schedules: Schedules) -> tirx.PrimFunc:
    if not has_root(func):
        return func.with_attr(SCHEDULE, "opaque")
    if schedules.best is not None:
        try:
            known = schedules.best.trace(func)
            if known is not None:
                return replay(func, known)
        except SCHEDULE_FAULTS as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            schedules.progress(f"a recorded schedule does not apply, using the heuristic ({reason:.120})")
    # Held until the end: a schedule that alone owns its module writes into the function's shared body.
    owner = tvm.IRModule({"main": func})
    if schedules.shipped is not None:
        found = _as_shipped(owner, target, schedules.shipped)
        if found is not None:
            return found
    sch = st.Schedule(owner)
    try:
        kind = apply_space(sch, target, schedules.choose)
    except SCHEDULE_FAULTS:
        kind = None
    if kind is None:
        return fallback.schedule(func, target).with_attr(SCHEDULE, "fallback")
    return sch.mod["main"].with_attr(SCHEDULE, kind)


def _as_shipped(owner: tvm.IRModule, target: DeviceTarget, shipped: Shipped) -> tirx.PrimFunc | None:
    """The function by what is shipped for it, None where that is nothing or does not fit."""
    sch = st.Schedule(owner)
    anchor = anchor_of(sch)
    if anchor is None:
        return None
    signature = signature_of(sch, *anchor)
    choose = shipped.chooser(signature)
    if choose is None:
        return None
    try:
        kind = apply_space(sch, target, choose)
        choose.finish()
    except SCHEDULE_FAULTS:
        shipped.tell(signature, fits=False)
        return None
    shipped.tell(signature, fits=True)
    return sch.mod["main"].with_attr(SCHEDULE, str(kind))


def has_root(func: tirx.PrimFunc) -> bool:
    """Whether `func` is made of blocks; what TVM writes out by hand, such as a scatter, is one opaque block.

    Its loops are as they were written: nothing says which may be reordered.
    """
    body = func.body
    return isinstance(body, st.SBlockRealize) and str(body.block.name_hint) == "root"


def without_pragmas(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func` without the marks that TVM leaves for its GPU passes, of which its code generator would warn."""

    def bare(stmt: tirx.AttrStmt) -> tirx.Stmt:
        return stmt.body if str(stmt.attr_key) == "pragma_scope" else stmt

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, bare)))


def space_of(func: tirx.PrimFunc) -> str | None:
    """The kind of `func`'s design space, None where it has none."""
    anchor = anchor_of(st.Schedule(func)) if has_root(func) else None
    return None if anchor is None else anchor[1]


def apply_space(sch: st.Schedule, target: DeviceTarget, choose: Chooser) -> str | None:
    """Apply the design space of the schedule's anchor; its kind, None where there is no anchor.

    Raises
    ------
    ScheduleError, InternalError, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError
        If as `SCHEDULE_FAULTS`: what was chosen does not fit the function.
    """
    anchor = anchor_of(sch)
    if anchor is None:
        return None
    block, kind = anchor
    sch.unannotate(block, "edge.space")
    SPACES[kind](sch, block, target, choose)
    return kind


def replay(func: tirx.PrimFunc, trace: Trace) -> tirx.PrimFunc:
    """`func` with the steps of `trace`.

    Raises
    ------
    ScheduleError, InternalError, RuntimeError, ValueError, TypeError, IndexError, ZeroDivisionError
        If as `SCHEDULE_FAULTS`: the trace is of another function.
    """
    kind = space_of(func)
    owner = tvm.IRModule({"main": func})
    sch = st.Schedule(owner)
    trace.apply_to_schedule(sch, remove_postproc=False)
    return sch.mod["main"].with_attr(SCHEDULE, str(kind))


def anchor_of(sch: st.Schedule) -> tuple[st.schedule.SBlockRV, str] | None:
    """The block that a design space is for, and that space's kind; None where there is none."""
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        kind = sch.get(block).annotations.get("edge.space")
        if kind is not None:
            return block, str(kind)
    return None
