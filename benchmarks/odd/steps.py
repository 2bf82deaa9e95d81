"""A small version that CI runs: odd operators over smooth neighbours, by exact counts of executed steps.

A handful of operators, one for each way to divide an axis into tiles, is compiled for an x86-64 core with
AVX2 and counted under qemu. A step is an instruction or an access to memory, as in `benchmarks.guard`. A
busy machine does not change the counts.

    python -m benchmarks.odd.steps
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tvm

from benchmarks.instructions.emulator import marks_on_this_machine
from benchmarks.odd.operators import Operator
from benchmarks.requirements import RequirementError
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.compiling.lower import lower
from builder.kernels.decisions import Chooser, Schedules, heuristic
from builder.target.device_target import resolve

TARGET: Final = "x86-64-v3"
# The largest count of steps per useful operation, over the smooth neighbour's. Completing the last vector of
# a case and its shorter last tile cost up to a fifth of it.
WORST: Final = 1.3
CASES: Final = (
    Operator("conv1x1", {"in": 61, "out": 75, "h": 13, "w": 17}),
    Operator("conv3x3-strided", {"in": 29, "out": 46, "h": 7, "w": 13}),
    Operator("depthwise", {"channels": 93, "h": 11, "w": 23, "radius": 1, "stride": 1}),
    Operator("matmul", {"rows": 37, "depth": 75, "columns": 139}),
    Operator("batch-matmul", {"batch": 2, "rows": 37, "depth": 45, "columns": 61}),
    Operator("pooling", {"channels": 93, "h": 7, "w": 13}),
    Operator("softmax", {"rows": 37, "columns": 197}),
    Operator("layer-norm", {"rows": 37, "columns": 197}),
    Operator("elementwise", {"channels": 37, "h": 13, "w": 17}),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """An operator, and what makes the decisions of its kernels."""

    operator: Operator
    choose: Chooser = heuristic


def factors(variants: Sequence[Variant], folder: Path) -> list[float]:
    """Return for each variant its steps per useful operation over those of its smooth neighbour.

    Neighbours get the heuristic's decisions.

    Parameters
    ----------
    variants
        What to count.
    folder
        A folder for the files that the guest reads.

    Raises
    ------
    RequirementError
        If qemu or gcc is missing.
    """
    neighbours = [Variant(variant.operator.smooth()) for variant in variants]
    steps = count([*variants, *neighbours], folder)
    return [
        odd / variant.operator.useful / (smooth / neighbour.operator.useful)
        for variant, neighbour, odd, smooth in zip(
            variants, neighbours, steps[: len(variants)], steps[len(variants) :], strict=True
        )
    ]


def count(variants: Sequence[Variant], folder: Path) -> list[int]:
    """Return the executed steps of each variant, in one run of the emulator."""
    target = resolve(TARGET)
    kernels: dict[str, tvm.tirx.PrimFunc] = {}
    calls: list[tuple[str, list[tuple[int, ...]]]] = []
    owners: list[int] = []
    for number, variant in enumerate(variants):
        lowered = lower(variant.operator.module(), target, Schedules(choose=variant.choose))
        for var, func in lowered.kernels.functions.items():
            if not variant.operator.counts(var.name_hint) or _is_for_weights(var.name_hint):
                continue
            name = f"v{number}_{var.name_hint}"
            kernels[name] = func.with_attr("global_symbol", name)
            calls.append((name, [tuple(map(int, param.shape)) for param in func.params]))
            owners.append(number)
    (folder / "calls.json").write_text(json.dumps(calls))
    (folder / "mod.so").write_bytes(link(compile_object(tvm.IRModule(kernels), target), target))
    marks = marks_on_this_machine("kernels.py", "edgebundle", [folder])
    steps = [0] * len(variants)
    for number, before, after in zip(owners, marks[:-1], marks[1:], strict=True):
        steps[number] += after - before
    return steps


def _is_for_weights(kernel: str) -> bool:
    """Whether a kernel transforms weights, which happens once, when a model is loaded."""
    return "weights" in kernel


def main() -> int:
    """Count all cases, and print them; return the exit status: 1 if one is above `WORST`."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = factors([Variant(operator) for operator in CASES], Path(folder))
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for operator, factor in zip(CASES, found, strict=True):
        print(f"{factor:.2f} {operator}")
    return 1 if max(found) > WORST else 0


if __name__ == "__main__":
    sys.exit(main())
