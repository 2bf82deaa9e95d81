"""A kernel's design space as a search sees it: decisions, each an index into the values it may take.

One function makes every point, and the heuristic uses the same one (`apply_space` in
`builder.kernels.schedule`). Here its decisions become `sample_categorical` variables of the schedule's trace,
which is what MetaSchedule mutates and what its database stores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tvm
from tvm import s_tir as st
from tvm import tirx
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.schedule import Trace

from builder.kernels.decisions import Chooser, Decision, heuristic
from builder.kernels.schedule import SCHEDULE_FAULTS, apply_space
from builder.target.device_target import DeviceTarget

Decisions = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """A candidate: a schedule, and the decisions that made it."""

    decisions: Decisions
    schedule: st.Schedule

    @property
    def trace(self) -> Trace:
        """The schedule's steps, which a record stores."""
        return self.schedule.trace


@dataclass(frozen=True, slots=True)
class DesignSpace:
    """The points of one workload.

    Attributes
    ----------
    func
        The unscheduled function.
    target
        The device.
    names
        The decisions' names, in the order in which they are made.
    values
        For each decision, the values that it may take, ascending.
    default
        The point that is used if nothing was measured, as indices into `values`.
    """

    func: tirx.PrimFunc
    target: DeviceTarget
    names: tuple[str, ...]
    values: tuple[tuple[int, ...], ...]
    default: Decisions

    @classmethod
    def of(cls, func: tirx.PrimFunc, target: DeviceTarget, choose: Chooser = heuristic) -> DesignSpace | None:
        """Return the space of a function, None if it has no anchor or its schedule does not apply.

        Parameters
        ----------
        func, target
            The unscheduled function, and the device.
        choose
            Makes the decisions of the default.
        """
        recorder = _Recorder(choose)
        try:
            with target.tvm_target:
                kind = apply_space(st.Schedule(func), target, recorder)
        except SCHEDULE_FAULTS:
            return None
        if kind is None:
            return None
        values, default = tuple(recorder.values), tuple(recorder.default)
        return cls(func, target, tuple(recorder.names), values, default)

    @property
    def size(self) -> int:
        """The number of points, including those that do not apply."""
        return math.prod(len(values) for values in self.values)

    def point(self, decisions: Decisions) -> Point | None:
        """Return the candidate at `decisions`, None if the schedule does not apply there."""
        # Keep the module: a schedule that is its only owner writes into the function's body, which
        # others share.
        workload, _ = workload_of(self.func)
        sch = st.Schedule(workload)
        try:
            with self.target.tvm_target:
                apply_space(sch, self.target, _Sampler(sch, decisions))
        except SCHEDULE_FAULTS:
            return None
        del workload
        return Point(decisions, sch)

    def all_decisions(self) -> Iterator[Decisions]:
        """Iterate over all points; the last decision varies fastest."""
        return itertools.product(*(range(len(values)) for values in self.values))

    def generator(self) -> ms.space_generator.ScheduleFn:
        """Return the space in the form that MetaSchedule's searches take."""

        def sample(sch: st.Schedule) -> None:
            sch.work_on("main")
            apply_space(sch, self.target, _Sampler(sch, None))

        return ms.space_generator.ScheduleFn(
            sample, sch_rules=[], postprocs=[], mutator_probs={ms.mutator.MutateTileSize(): 0.9}
        )

    def describe(self, decisions: Decisions) -> str:
        """Return the values that `decisions` stand for, such as `4x7x2`."""
        return "x".join(str(self.values[i][d]) for i, d in enumerate(decisions))


def workload_of(func: tirx.PrimFunc) -> tuple[tvm.IRModule, str]:
    """Return the module that records of `func` are stored under, and its structural hash.

    The function is called `main` in it, so that its own name does not matter.
    """
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return mod, str(ms.database.Workload(mod).as_json()[0])


def decisions_of(trace: Trace) -> Decisions:
    """Return the decisions in a trace, in order."""
    found = trace.decisions
    return tuple(int(found[step]) for step in trace.insts if step in found)


class _Recorder:
    """Lets another chooser decide, and keeps each decision's name, values and answer."""

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self.names: list[str] = []
        self.values: list[tuple[int, ...]] = []
        self.default: list[int] = []

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        options = tuple(sorted({*values, default}))
        self.names.append(name)
        self.values.append(options)
        chosen = self._choose(name, values, default)
        self.default.append(options.index(chosen))
        return chosen


class _Sampler:
    """Makes each decision a variable of the schedule's trace, with a given value or a random one.

    `decisions`: indices into the values, in order; None for random ones.
    """

    def __init__(self, sch: st.Schedule, decisions: Decisions | None) -> None:
        self._sch = sch
        self._left = None if decisions is None else iter(decisions)

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        del name
        options = sorted({*values, default})
        decision = None if self._left is None else next(self._left)
        return self._sch.sample_categorical(options, [1 / len(options)] * len(options), decision=decision)
