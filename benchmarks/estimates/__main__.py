"""Estimates each kernel of a model on a board, and says what it waits for. No board is timed.

    python -m benchmarks.estimates mobilenetv2 --board rpi4

It needs root, Debian's `qemu-user` and `llvm-19`, and gcc, as `make bench-arm` does.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from rich.console import Console

from benchmarks import tables
from benchmarks.estimates.board import boards
from benchmarks.estimates.estimate import NOTHING, Estimate
from benchmarks.estimates.inference import estimated, recorded
from benchmarks.instructions.emulator import AGENT_PACKAGES, Emulator
from benchmarks.prepare import MODELS, fixed_shapes, source
from benchmarks.requirements import RequirementError
from benchmarks.zoo.comparison import LeftOutError
from benchmarks.zoo.models import NAMES

HEADS: Final = ("kernel", "calls", "ms", "compute", "misses", "streams", "memory", "MB", "ms, all", "MB, all")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile a model, run it under qemu, and print its kernels; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.estimates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model", help=f"one of {', '.join(MODELS)}; of the zoo; or an ONNX file with fixed shapes"
    )
    parser.add_argument("--board", choices=list(boards()), default="rpi4")
    parser.add_argument("--tuning-records", metavar="DIR", help="as `edgebundle compile` has it")
    args = parser.parse_args(arguments)
    try:
        emulator = Emulator.prepare(AGENT_PACKAGES)
        with tempfile.TemporaryDirectory() as folder:
            found = of_kernels(emulator, args.model, args.board, args.tuning_records, Path(folder))
    except (RequirementError, LeftOutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    title = f"{args.model}: estimated times on {boards()[args.board].name}, no board timed"
    tables.show(Console(width=None if sys.stdout.isatty() else 160), title, list(HEADS), rows(found))
    return 0


def of_kernels(
    emulator: Emulator, model: str, preset: str, records: str | None, place: Path
) -> dict[str, tuple[int, Estimate, Estimate]]:
    """Return kernel -> its calls in an inference, and estimates with one thread and with all."""
    from builder import compile
    from builder.compiling.sample_inputs import make_inputs
    from builder.importer import import_onnx

    path = Path(model)
    if model in MODELS or model in NAMES:
        path = place / "model.onnx"
        onnx.save(source(model), path)
    imported = import_onnx(path, input_shapes=fixed_shapes(model))
    inputs: dict[str, Any] = make_inputs(imported.inputs, imported.onnx)
    np.savez(place / "inputs.npz", **inputs)
    for member, data in compile(imported, preset, tuning_records=records).members.items():
        if "/" not in member:
            (place / member).write_bytes(data)
    board = boards()[preset]
    times = estimated(recorded(emulator, board, "nodes.py", "edgebundle", str(place)), board)
    found: dict[str, tuple[int, Estimate, Estimate]] = {}
    for mark, name in enumerate(json.loads((place / "nodes.json").read_text())):
        calls, one, all_cores = found.get(name, (0, NOTHING, NOTHING))
        found[name] = (calls + 1, one + times[1][mark], all_cores + times[board.cores][mark])
    return found


def rows(found: dict[str, tuple[int, Estimate, Estimate]]) -> list[list[str]]:
    """Return the table's cells: the slowest kernel first, their sum last."""
    order = sorted(found.items(), key=lambda entry: -entry[1][1].ns)
    total = (0, NOTHING, NOTHING)
    for each in found.values():
        total = (total[0] + each[0], total[1] + each[1], total[2] + each[2])
    return [
        [name, str(calls), *(f"{ns / 1e6:.3f}" for ns in
         (one.ns, one.compute_ns, one.waiting_ns, one.streaming_ns, one.memory_ns)),
         f"{one.memory_bytes / 1e6:.2f}", f"{both.ns / 1e6:.3f}", f"{both.memory_bytes / 1e6:.2f}"]
        for name, (calls, one, both) in [*order, ("sum", total)]
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
