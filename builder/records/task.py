"""A kernel to tune, with its design space."""

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
        Its number in the model, the name of its function, and the kind of its design space.
    workload
        The unscheduled function as `main` of a module, which identifies its records.
    key
        Structural hash of the workload, as MetaSchedule's database writes it.
    calls
        Calls in one inference; a gain counts that many times.
    flops
        Floating-point operations of one call.
    space
        All points that can be chosen.
    nodes
        The nodes of the model that its first call computes, as `Operator name`; empty if they are not known.
    """

    index: int
    name: str
    kind: str
    workload: tvm.IRModule
    key: str
    calls: int
    flops: float
    space: DesignSpace
    nodes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What a person calls it: the first node that it computes, or else its function."""
        return self.nodes[0] if self.nodes else self.name
