"""Orders the loops of one function: by a record, by the design space of its anchor, or by the fallback.

Promises: every function gets a schedule, and one that is valid. A record or a design space that does not fit
is skipped, and the next source is tried; the attribute `SCHEDULE` says which one the loops come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import tvm
import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.s_tir.schedule import SBlockRV, Trace

from builder.errors import BuildError, UnsuitedError, lines_of
from builder.kernels.decisions import SPACE_MARK, UNTUNED, Chooser, Schedules
from builder.kernels.identities import begin_with_infinities, carry_nan, surround_with_infinities
from builder.kernels.postprocessing import postprocess
from builder.kernels.spaces import (
    attention,
    blocked_matmul,
    columns,
    convolution,
    depthwise,
    fallback,
    group_norm,
    half_convolution,
    half_matmul,
    half_winograd,
    integer_convolution,
    integer_depthwise,
    integer_matmul,
    integer_winograd,
    matmul,
    pixels,
    planes,
    pooling,
    resize,
    rows,
    separable,
    tile_convolution,
    tile_matmul,
    tiled,
    transpose,
    unpacking,
    winograd,
)
from builder.target.device_target import DeviceTarget

Schedule = Callable[[st.Schedule, SBlockRV, DeviceTarget, Chooser], None]

SPACES: Final[Mapping[str, Schedule]] = {
    attention.KIND: attention.schedule,
    blocked_matmul.KIND: blocked_matmul.schedule,
    columns.KIND: columns.schedule,
    convolution.KIND: convolution.schedule,
    depthwise.KIND: depthwise.schedule,
    group_norm.KIND: group_norm.schedule,
    half_convolution.KIND: half_convolution.schedule,
    half_matmul.KIND: half_matmul.schedule,
    half_winograd.KIND: half_winograd.schedule,
    integer_convolution.KIND: integer_convolution.schedule,
    integer_depthwise.KIND: integer_depthwise.schedule,
    integer_matmul.KIND: integer_matmul.schedule,
    integer_winograd.KIND: integer_winograd.schedule,
    integer_winograd.WEIGHTS_KIND: winograd.schedule_weights,
    matmul.KIND: matmul.schedule,
    matmul.BATCHED: matmul.schedule_batched,
    pixels.KIND: pixels.schedule,
    planes.KIND: planes.schedule,
    pooling.KIND: pooling.schedule,
    resize.KIND: resize.schedule,
    rows.KIND: rows.schedule,
    separable.KIND: separable.schedule,
    tile_convolution.KIND: tile_convolution.schedule,
    tile_matmul.KIND: tile_matmul.schedule,
    tiled.KIND: tiled.schedule,
    tiled.WEIGHTS_KIND: tiled.schedule_weights,
    transpose.KIND: transpose.schedule,
    unpacking.KIND: unpacking.schedule,
    winograd.KIND: winograd.schedule,
    winograd.WEIGHTS_KIND: winograd.schedule_weights,
}

FAULT: Final = "edge.fault"  # a kernel's attribute: why its space failed, if the fallback orders its loops
SCHEDULE: Final = "edge.schedule"  # a kernel's attribute: the kind of space that its loops come from
WRITTEN: Final = "edge.written"  # a kernel's attribute: what wrote its loops, so that none are to be ordered
FALLBACK: Final = "fallback"  # its value for a kernel without a design space, or with one that does not apply
OPAQUE: Final = "opaque"  # its value for a kernel that is not made of blocks
# The errors of a space that does not apply. Degenerate shapes (no axes, no elements) cause the last four.
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
    """Order the loops of `func` for `target`.

    Parameters
    ----------
    func
        An unscheduled function.
    target
        The device.
    schedules
        Where the order of the loops comes from.

    Returns
    -------
    tirx.PrimFunc
        The scheduled function, with the attribute `SCHEDULE`.

    Raises
    ------
    BuildError
        If `schedules` is strict and the design space of the function's anchor fails.
    """
    func = surround_with_infinities(without_pragmas(func))
    ordered = begin_with_infinities(_ordered(func, target, schedules))
    return postprocess(carry_nan(ordered, target.arch), target)


def _ordered(func: tirx.PrimFunc, target: DeviceTarget, schedules: Schedules) -> tirx.PrimFunc:
    """Order the loops by the first source that fits, and mark the function with it."""
    if not has_root(func):
        return func.with_attr(SCHEDULE, str(func.attrs.get(WRITTEN, OPAQUE)))
    if schedules.best is not None:
        try:
            known = schedules.best.trace(func)
            if known is not None:
                return replay(func, known)
        except SCHEDULE_FAULTS as error:
            reason = lines_of(error)[0]
            schedules.progress(f"a recorded schedule does not apply, using the heuristic ({reason:.120})")
    # Keep a second reference: a schedule that is its module's only owner writes into the function's body,
    # which others share.
    owner = tvm.IRModule({"main": func})
    sch = st.Schedule(owner)
    try:
        kind, fault = apply_space(sch, target, schedules.choose), ""
    except UnsuitedError:
        kind, fault = None, ""
    except SCHEDULE_FAULTS as error:
        if schedules.strict:
            raise BuildError(f"expected a schedule of the space {space_of(func)}, got: {error}") from error
        kind, fault = None, f"{space_of(func)} failed ({lines_of(error)[0]:.120})"
        schedules.progress(f"a kernel is slower than it could be: {fault}")
    if kind is None:
        func = fallback.schedule(func, target).with_attr(SCHEDULE, FALLBACK)
        return func.with_attr(FAULT, fault) if fault else func
    return sch.mod["main"].with_attr(SCHEDULE, kind)


def has_root(func: tirx.PrimFunc) -> bool:
    """Whether `func` is made of blocks, which a schedule can order.

    A function that TVM writes out by hand, such as a scatter, is one opaque block: nothing says which of its
    loops may be reordered.
    """
    body = func.body
    return isinstance(body, st.SBlockRealize) and str(body.block.name_hint) == "root"


def without_pragmas(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` without the pragmas of TVM's GPU passes, which make its CPU code generator warn."""

    def bare(stmt: tirx.AttrStmt) -> tirx.Stmt:
        return stmt.body if str(stmt.attr_key) == "pragma_scope" else stmt

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.AttrStmt, bare)))


def space_of(func: tirx.PrimFunc) -> str | None:
    """Return the kind of `func`'s design space, None if it has none."""
    anchor = anchor_of(st.Schedule(func)) if has_root(func) else None
    return None if anchor is None else anchor[1]


def apply_space(sch: st.Schedule, target: DeviceTarget, choose: Chooser) -> str | None:
    """Apply the design space of the schedule's anchor; return its kind, None if there is no anchor.

    `sch`: an unscheduled function's schedule; it is changed in place, even if this raises.
    Raises `ScheduleError`, `InternalError`, `RuntimeError`, `ValueError`, `TypeError`, `IndexError` or
        `ZeroDivisionError` if a decision does not fit the function; these are `SCHEDULE_FAULTS`.
    """
    anchor = anchor_of(sch)
    if anchor is None:
        return None
    block, kind = anchor
    sch.unannotate(block, SPACE_MARK)
    SPACES[kind](sch, block, target, choose)
    return kind


def replay(func: tirx.PrimFunc, trace: Trace) -> tirx.PrimFunc:
    """Apply the steps of `trace` to an unscheduled `func`.

    Raises `ScheduleError`, `InternalError`, `RuntimeError`, `ValueError`, `TypeError`, `IndexError` or
        `ZeroDivisionError` if the trace was recorded for another function; these are `SCHEDULE_FAULTS`.
    """
    kind = space_of(func)
    owner = tvm.IRModule({"main": func})
    sch = st.Schedule(owner)
    trace.apply_to_schedule(sch, remove_postproc=False)
    return sch.mod["main"].with_attr(SCHEDULE, str(kind))


def anchor_of(sch: st.Schedule) -> tuple[SBlockRV, str] | None:
    """Return the anchor, and the kind of its design space; None if no block is marked as one.

    A block that unpacks channels is the anchor only if there is no other.
    """
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    kinds = [(block, sch.get(block).annotations.get(SPACE_MARK)) for block in blocks]
    marked = [(block, str(kind)) for block, kind in kinds if kind is not None]
    return min(marked, key=lambda each: each[1] == unpacking.KIND, default=None)
