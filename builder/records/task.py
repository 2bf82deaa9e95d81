"""A kernel to tune, and the design space that it has."""

from __future__ import annotations

from dataclasses import dataclass

import tvm

from builder.kernels.design_space import DesignSpace


@dataclass(frozen=True, slots=True)
class Task:
    """A kernel to tune.

    Attributes
    ----------
    index, name, kind
        Its number in the model, its function's name and its design space's.
    workload
        The unscheduled function as `main` of a module: what records are kept under.
    key
        Structural hash of the workload, as MetaSchedule's database writes it.
    calls
        Calls in one inference: what a gain is worth.
    flops
        Floating-point operations of one call.
    space
        The points that there are.
    """

    index: int
    name: str
    kind: str
    workload: tvm.IRModule
    key: str
    calls: int
    flops: float
    space: DesignSpace
