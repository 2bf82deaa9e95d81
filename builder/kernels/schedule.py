"""Hands each function to the design space of its anchor, and to the fallback where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import s_tir as st
from tvm import tirx

from builder.kernels import convolution, depthwise, fallback, matmul, pooling, rows, winograd
from builder.target import DeviceTarget

Schedule = Callable[[st.Schedule, st.schedule.SBlockRV, DeviceTarget], None]

SPACES: Mapping[str, Schedule] = {
    convolution.KIND: convolution.schedule,
    depthwise.KIND: depthwise.schedule,
    matmul.KIND: matmul.schedule,
    matmul.BATCHED: matmul.schedule_batched,
    pooling.KIND: pooling.schedule,
    rows.KIND: rows.schedule,
    winograd.KIND: winograd.schedule,
    winograd.WEIGHTS_KIND: winograd.schedule_weights,
}

SCHEDULE = "edge.schedule"  # a kernel's attribute: the design space its loops come from


def schedule(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """`func` with its loops ordered for `target`."""
    sch = st.Schedule(func)
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        kind = sch.get(block).annotations.get("edge.space")
        if kind is None:
            continue
        try:
            sch.unannotate(block, "edge.space")
            SPACES[str(kind)](sch, block, target)
        except (st.ScheduleError, tvm.error.InternalError, RuntimeError):
            break
        return sch.mod["main"].with_attr(SCHEDULE, str(kind))
    return fallback.schedule(func, target).with_attr(SCHEDULE, "fallback")
