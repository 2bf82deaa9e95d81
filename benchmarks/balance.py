"""How well threads can share a scheduled kernel, by counting: nothing is run.

A kernel's time is divided into its parallel loops and the rest, by the estimate of `cost_model`. Each thread
gets as many successive rounds of a loop, rounded up; the rest runs on one thread. The estimate is a bound:
it leaves out what a launch costs, and what threads cost each other in caches and memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm_ffi
from tvm import tirx
from tvm_ffi import WalkResult

from builder.kernels.cost_model import time_us
from builder.kernels.spaces.shares import most_rounds
from builder.target.device_target import DeviceTarget


@dataclass(frozen=True, slots=True)
class Part:
    """A parallel loop of a kernel, or the rest of it.

    Attributes
    ----------
    rounds
        Rounds that threads share; 1 for what runs on one thread.
    time_us
        Estimated microseconds of all of them on one thread.
    """

    rounds: int
    time_us: float


@dataclass(frozen=True, slots=True)
class Balance:
    """A scheduled kernel.

    Attributes
    ----------
    parts
        Its parallel loops, and the rest if there is one.
    """

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, func: tirx.PrimFunc, target: DeviceTarget) -> Balance:
        """Divide a scheduled function into its parts."""
        loops: list[tirx.For] = []

        def visit(loop: tirx.For) -> WalkResult:
            if loop.kind != tirx.ForKind.PARALLEL:
                return WalkResult.ADVANCE
            loops.append(loop)
            return WalkResult.SKIP

        tvm_ffi.structural_walk(func.body, ((tirx.For, visit),), order="pre")
        shared = [Part(int(loop.extent), time_us(func.with_body(loop), target)) for loop in loops]
        rest = time_us(func, target) - sum(part.time_us for part in shared)
        return cls((*shared, Part(1, rest)) if rest > 0 else tuple(shared))

    @property
    def time_us(self) -> float:
        """Estimated microseconds on one thread."""
        return sum(part.time_us for part in self.parts)

    def time_us_with(self, threads: int) -> float:
        """Return the estimated microseconds of the thread with the most work."""
        return sum(part.time_us * most_rounds(part.rounds, threads) / part.rounds for part in self.parts)
