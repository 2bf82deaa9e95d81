"""Compiles an operator and its smooth neighbour for this machine, and times them on one core, in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.interpreter import Interpreter
from benchmarks.odd.operators import Operator
from builder.compiling.lower import lower
from builder.kernels.schedule import SCHEDULE
from builder.target.device_target import DeviceTarget

BLOCK_S: Final = 0.004
LEAST_RUNS: Final = 3


@dataclass(frozen=True, slots=True)
class Timed:
    """An operator's time beside that of its smooth neighbour.

    Attributes
    ----------
    operator, smooth
        The two.
    odd_us, smooth_us
        Microseconds of one run of each: the shortest block.
    schedules
        Kernel of the operator -> the design space that its loops come from.
    """

    operator: Operator
    smooth: Operator
    odd_us: float
    smooth_us: float
    schedules: Mapping[str, str]

    @property
    def factor(self) -> float:
        """Time per useful operation, divided by the smooth neighbour's."""
        return self.odd_us / self.operator.useful / (self.smooth_us / self.smooth.useful)

    @property
    def gops(self) -> float:
        """Billions of useful operations per second."""
        return self.operator.useful / self.odd_us / 1e3


def compare(operator: Operator, target: DeviceTarget, blocks: int) -> Timed:
    """Time `operator` and its neighbour in `blocks` blocks each, in turn.

    Other work only ever makes a block slower, so the shortest one of each counts.
    """
    smooth = operator.smooth()
    (run_odd, schedules), (run_smooth, _) = _compiled(operator, target), _compiled(smooth, target)
    odd, neighbour = [], []
    for _ in range(blocks):
        odd.append(_block_us(run_odd))
        neighbour.append(_block_us(run_smooth))
    return Timed(operator, smooth, min(odd), min(neighbour), schedules)


def _compiled(operator: Operator, target: DeviceTarget) -> tuple[Callable[[], object], Mapping[str, str]]:
    """Compile an operator; return what runs it, and the design space of each of its kernels."""
    lowered = lower(operator.module(), target)
    interpreter = Interpreter(lowered, target.tvm_target)
    state = np.random.default_rng(0)
    # Kernels that are not counted must still run once: the others read what they write.
    interpreter.run(
        {
            name: state.standard_normal(interpreter.tensors[i].shape, "float32")
            for i, name in enumerate(interpreter.inputs)
        }
    )
    calls = [
        (interpreter.library[step.kernel], [interpreter.tensors[i] for i in step.arguments + step.results])
        for step in interpreter.steps
        if operator.counts(step.kernel)
    ]
    if not calls:
        raise ValueError(f"{operator}: expected a kernel to count, got none of {interpreter.steps}")
    kernels = {var.name_hint: func for var, func in lowered.kernels.functions.items()}
    schedules = {
        step.kernel: str(kernels[step.kernel].attrs[SCHEDULE])
        for step in interpreter.steps
        if operator.counts(step.kernel)
    }

    def run() -> None:
        for function, arguments in calls:
            function(*arguments)

    return run, schedules


def _block_us(run: Callable[[], object]) -> float:
    """Return the median microseconds of the runs of one block, after a run that fills the caches."""
    run()
    clock = time.perf_counter
    times: list[float] = []
    end = clock() + BLOCK_S
    while len(times) < LEAST_RUNS or clock() < end:
        began = clock()
        run()
        times.append(clock() - began)
    return statistics.median(times) * 1e6
