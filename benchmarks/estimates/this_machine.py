"""Checks estimates against time: variants of kernels, estimated under qemu and measured on this machine.

    python -m benchmarks.estimates.this_machine [--models resnet18 mobilenetv2] [--operators 12] [--points 6]

For each operator, some points of its design space are compiled for a core with AVX2 (qemu has no AVX-512).
Each is estimated with this machine's caches, and measured on one thread, in turn. What is compared is the
ratio of a variant's time to the heuristic's: the clock of a virtual machine is not known. A ratio is right
if its estimate differs from the measured one by at most 15 %.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import timer
from benchmarks.estimates.board import Board, this_machine
from benchmarks.estimates.builders import Builders, Candidates
from benchmarks.estimates.estimate import Estimate, by_label, cycles
from benchmarks.estimates.operators import operators_of
from benchmarks.instructions.emulator import X86_PROGRAMS, plain_command
from benchmarks.instructions.traffic import watch
from benchmarks.layers import Roof
from benchmarks.requirements import RequirementError, require_programs
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.target.device_target import resolve

TARGET: Final = "x86-64-v3"
RIGHT: Final = 0.15
ROUNDS: Final = 15
MOST_FLOPS: Final = 3e8  # of an operator: larger ones take the emulator minutes
LIMIT_S: Final = 600


@dataclass(frozen=True, slots=True)
class Compared:
    """A variant beside the heuristic's choice.

    Attributes
    ----------
    signature
        The operator.
    point
        The variant's decisions.
    estimated, measured
        The variant's time over the heuristic's.
    instructions
        Its instructions over the heuristic's, for comparison.
    """

    signature: str
    point: str
    estimated: float
    measured: float
    instructions: float

    @property
    def error(self) -> float:
        """How far the larger of estimate and measurement exceeds the smaller."""
        return max(self.estimated, self.measured) / min(self.estimated, self.measured) - 1

    @property
    def error_of_instructions(self) -> float:
        """The same, if the ratio of instructions were the estimate."""
        return max(self.instructions, self.measured) / min(self.instructions, self.measured) - 1


def points(task: Task, count: int, chance: random.Random) -> list[Decisions]:
    """Return the heuristic's point and others, one to three decisions away from it."""
    values, default = task.space.values, task.space.default
    free = [axis for axis, each in enumerate(values) if len(each) > 1]
    found = [default]
    for _ in range(20 * count):
        if len(found) == count or not free:
            break
        point = list(default)
        for axis in chance.sample(free, min(len(free), chance.randint(1, 3))):
            point[axis] = chance.randrange(len(values[axis]))
        if tuple(point) not in found:
            found.append(tuple(point))
    return found


def measured_roof(prefix: Sequence[str]) -> Roof:
    """Return the bandwidths of one core, measured in a process of their own."""
    script = "import dataclasses, json; from benchmarks.layers import roof; "
    script += "print(json.dumps(dataclasses.asdict(roof(1))))"
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return Roof(**json.loads(done.stdout))


def estimates(built: Sequence[Candidates], board: Board, folder: Path) -> list[list[tuple[Estimate, int]]]:
    """Return for each variant of each operator its estimate and its instructions."""
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps(_jobs(built, folder)))
    command = plain_command("variants.py", [str(jobs)])
    traffic = watch(command, board.first, [board.caches(1)], read_allocate=board.read_allocate)
    found = by_label(traffic, board, 1, 0, cycles(traffic, board))
    instructions: dict[int, int] = {}
    for stretch in traffic.stretches:
        instructions[stretch.label] = instructions.get(stretch.label, 0) + stretch.instructions
    labels = iter(range(0, 10**9, 2))
    return [
        [(found[label], instructions[label]) for label in _taken(labels, len(each.decisions))]
        for each in built
    ]


def _taken(labels: Any, count: int) -> list[int]:  # noqa: ANN401
    return [next(labels) for _ in range(count)]


def _jobs(built: Sequence[Candidates], folder: Path) -> list[dict[str, Any]]:
    jobs = []
    for number, each in enumerate(built):
        code = folder / f"{number}.so"
        code.write_bytes(each.code)
        count = len(each.decisions)
        jobs.append(
            {"code": str(code), "arguments": each.arguments, "number": count, "kernels": list(range(count)),
             "rounds": ROUNDS, "threads": 1}
        )  # fmt: skip
    return jobs


def measured(built: Sequence[Candidates], folder: Path, prefix: Sequence[str]) -> list[list[float]]:
    """Return the shortest time of each variant of each operator; the variants of an operator run in turn.

    Other work on the machine only makes a round slower.
    """
    file = folder / "measured.json"
    file.write_text(json.dumps(_jobs(built, folder)))
    done = subprocess.run(
        [*prefix, sys.executable, str(Path(timer.__file__)), str(file)],
        capture_output=True, text=True, check=True, timeout=LIMIT_S,
    )  # fmt: skip
    return [[min(rounds) for rounds in each] for each in json.loads(done.stdout)]


def compare(models: Sequence[str], operators: int, count: int, prefix: Sequence[str]) -> list[Compared]:
    """Compile, estimate and measure variants of the operators of `models` with the most work."""
    chance = random.Random(0)
    found = operators_of(models, resolve(TARGET), None)
    tasks = [(each.signature, each.tasks[0]) for each in found if each.tasks[0].flops <= MOST_FLOPS]
    tasks = tasks[:operators]
    builders = Builders(0)
    try:
        asked = [(task, points(task, count, chance)) for _, task in tasks]
        built = builders.build(asked)
    finally:
        builders.close()
    usable = [
        (signature, each) for (signature, _), each in zip(tasks, built, strict=True)
        if each is not None and len(each.decisions) > 1
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = measured([each for _, each in usable], folder, prefix)
        board = this_machine(measured_roof(prefix))
        guesses = estimates([each for _, each in usable], board, folder)
    results = []
    for (signature, each), real, guess in zip(usable, times, guesses, strict=True):
        results += [
            Compared(
                signature,
                str(each.decisions[i]),
                guess[i][0].ns / guess[0][0].ns,
                real[i] / real[0],
                guess[i][1] / guess[0][1],
            )
            for i in range(1, len(each.decisions))
        ]
    return results


def summary(results: Sequence[Compared]) -> list[str]:
    """Return lines that describe the errors of the estimates."""
    lines = []
    for name, errors in (
        ("estimate", sorted(each.error for each in results)),
        ("instructions only", sorted(each.error_of_instructions for each in results)),
    ):
        quarters = [errors[len(errors) * q // 4] for q in (1, 2, 3)]
        right = sum(error <= RIGHT for error in errors) / len(errors)
        lines.append(
            f"{name}: {len(errors)} ratios, error median {quarters[1]:.1%}, quartiles {quarters[0]:.1%} and "
            f"{quarters[2]:.1%}, worst {errors[-1]:.0%}; within {RIGHT:.0%}: {right:.0%}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every ratio and the distribution of errors; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.estimates.this_machine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", default=["resnet18", "mobilenetv2"])
    parser.add_argument("--operators", type=int, default=12, help="operators with the most work")
    parser.add_argument("--points", type=int, default=6, help="variants of each, with the heuristic's")
    parser.add_argument("--prefix", nargs="+", default=[], help="a command that waits for a quiet machine")
    args = parser.parse_args(arguments)
    try:
        require_programs(X86_PROGRAMS)
        results = compare(args.models, args.operators, args.points, args.prefix)
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for each in results:
        print(
            f"{each.signature[:60]:60} {each.point:28} estimated {each.estimated:6.3f} "
            f"measured {each.measured:6.3f} instructions {each.instructions:6.3f} error {each.error:5.1%}"
        )
    print("\n".join(summary(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
