"""The last step for every scheduled function, whether a heuristic, a record or a search ordered its loops.

It leaves out products with padding, adds the prefetches that a design space asked for, lets sums start from
the bias, and leaves out zeros that a copy overwrites. If a kernel is too short to be worth waking other
cores, it becomes serial, whichever design space its loops come from: a launch costs two to five microseconds,
and the other cores must be woken first.
"""

from __future__ import annotations

from typing import Final

import tvm_ffi
from tvm import tirx

from builder.kernels.borders import write_only_borders
from builder.kernels.cost_model import time_us
from builder.kernels.initial_sums import start_from_bias
from builder.kernels.spaces.idle_taps import skip_idle_taps
from builder.kernels.spaces.prefetch import prefetch_panels
from builder.target.device_target import DeviceTarget

# Below this, waking the other cores costs about as much as they could save.
WORTH_A_LAUNCH_US: Final = 20.0


def postprocess(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """Return a scheduled function as it ships.

    Every kernel must pass through here before it is measured or compiled: the measured kernel is the
    one that ships.
    """
    func = prefetch_panels(skip_idle_taps(func), target)
    return _serial_if_short(write_only_borders(start_from_bias(func)), target)


def _serial_if_short(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """Make the parallel loops of `func` serial if its work is too short to be worth a launch."""
    if time_us(func, target) >= WORTH_A_LAUNCH_US:
        return func

    def serial(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.PARALLEL:
            return loop
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, loop.annotations
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (tirx.For, serial)))
