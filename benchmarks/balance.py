"""How well threads can share a scheduled kernel, by counting: nothing is run.

    python -m benchmarks.balance maxvit.onnx --target rpi4
    python -m benchmarks.balance slim-320 --threads 4 16

Prints how many times as fast a model could be at most with some numbers of threads, and for the last of them
the kernels that lose most.

A kernel's time is divided into its parallel loops and the rest, by the estimate of `cost_model`. Each thread
gets as many successive rounds of a loop, rounded up; the rest runs on one thread. The estimate is a bound:
it leaves out what a launch costs, and what threads cost each other in caches and memory.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm_ffi import WalkResult

from benchmarks.architectures import ARCHITECTURES, generate
from builder.compiling.lower import LoweredModule, lower
from builder.importer import import_onnx
from builder.kernels.cost_model import time_us
from builder.kernels.rewriter import op_name
from builder.kernels.spaces.shares import THREADS, most_rounds
from builder.target.device_target import DeviceTarget, resolve

_MOST_KERNELS: Final = 10  # that are printed


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


def lost_us(balance: Balance, threads: int) -> float:
    """Return the microseconds that a kernel takes longer than if threads shared all of it evenly."""
    return balance.time_us_with(threads) - balance.time_us / threads


def report(lowered: LoweredModule, target: DeviceTarget, threads: Sequence[int]) -> str:
    """Return the bounds of a model, and the kernels that lose most with the last number of threads."""
    calls = Counter(
        str(binding.value.args[0].name_hint)
        for block in lowered.main.body.blocks
        for binding in block.bindings
        if isinstance(binding.value, Call) and op_name(binding.value) == "relax.call_tir"
    )
    kernels = {g.name_hint: Balance.of(func, target) for g, func in lowered.kernels.functions.items()}
    serial_us = sum(n * kernels[name].time_us for name, n in calls.items())
    lines = []
    for t in threads:
        shared = sum(n * kernels[name].time_us_with(t) for name, n in calls.items())
        lines.append(f"{t} threads: at most {serial_us / shared:.2f} times as fast as one")
    last = threads[-1]
    lines.append(f"{'lost us':>9} {'calls':>5}  kernel: rounds of its parallel loops, 1 for the rest")
    worst = sorted(calls, key=lambda name: -calls[name] * lost_us(kernels[name], last))
    for name in worst[:_MOST_KERNELS]:
        rounds = ", ".join(f"{part.rounds} in {part.time_us:.0f} us" for part in kernels[name].parts)
        lost = calls[name] * lost_us(kernels[name], last)
        lines.append(f"{lost:9.1f} {calls[name]:5d}  {name[:60]}: {rounds}")
    return "\n".join(lines)


def main() -> None:
    """Compile a model as far as needed, and print its report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="an architecture's name (resnet18, bert, ...) or an ONNX file")
    parser.add_argument("--target", default="host")
    parser.add_argument("--threads", nargs="+", type=int, default=list(THREADS))
    options = parser.parse_args()
    source = generate(options.model) if options.model in ARCHITECTURES else Path(options.model)
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 128))
    imported = import_onnx(
        source, input_shapes=shapes if options.model == "bert" else None, progress=lambda _: None
    )
    target = resolve(options.target)
    print(report(lower(imported.mod, target), target, options.threads))


if __name__ == "__main__":
    main()
