"""What follows the loops' order, whoever chose it: the heuristic, a record or a search."""

from __future__ import annotations

from tvm import tirx

from builder.kernels.spaces.prefetch import prefetch_panels
from builder.kernels.work import serial_where_small
from builder.target.device_target import DeviceTarget


def finish(func: tirx.PrimFunc, target: DeviceTarget) -> tirx.PrimFunc:
    """A scheduled function as it ships: what is measured and what is compiled must pass here."""
    return serial_where_small(prefetch_panels(func, target), target)
