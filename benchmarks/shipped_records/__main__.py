"""Search for shipped records: decisions that are better than the heuristic's, operator by operator.

    python -m benchmarks.shipped_records x86-avx512 --minutes 20 --timing-prefix 'nice -n -20'
    python -m benchmarks.shipped_records cortex-a72 --models resnet50 --kinds conv2d

Visits the operators of the benchmark's models, the costliest first. After every few operators it writes the
decisions that proved better to builder/records/CORE.json. Entries of operators that were not visited stay.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from benchmarks.shipped_records.cores import MODELS, TARGETS
from benchmarks.shipped_records.descent import Descent
from benchmarks.shipped_records.measure import LEAST_GAIN, Measure
from benchmarks.shipped_records.operators import Operator, operators_of
from builder.kernels.design_space import Decisions
from builder.records.shipped import CoreRecords, ShippedEntry, name_for, point_of
from builder.records.task import Task
from builder.target.device_target import DeviceTarget, resolve

FOLDER: Final = Path(__file__).parents[2] / "builder" / "records"
AT_ONCE: Final = 8  # signatures that are searched together, and share a timing process
MOST_POINTS: Final = 48


def main() -> int:
    """Search the operators until time is up; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped_records", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("core", choices=list(TARGETS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help="design spaces to visit (default: all)")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="stop after this many minutes (default: 60)"
    )
    parser.add_argument(
        "--points", type=int, default=MOST_POINTS, help="most points of an operator (default: %(default)s)"
    )
    parser.add_argument(
        "--like",
        choices=list(TARGETS),
        help="only try the points that were found for another core",
    )
    parser.add_argument(
        "--timing-prefix", default="", metavar="CMD", help="wrap the final comparisons in this command"
    )
    parser.add_argument("--steps", type=int, default=8, help="most steps of a search (default: 8)")
    parser.add_argument("--niceness", type=int, default=5, help="niceness of compiling (default: 5)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the compiling processes too
    target = resolve(TARGETS[args.core])
    if name_for(target) != args.core:
        parser.error(f"expected a machine with cores of {args.core}, got {name_for(target)}")
    measure = measure_for(target, shlex.split(args.timing_prefix), args.niceness)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        todo = operators_of(args.models, target, args.kinds)
        print(f"{len(todo)} operators, {sum(w.tasks[0].space.size for w in todo)} points", flush=True)
        other = CoreRecords.read(args.like) if args.like else None
        if other is not None:
            todo = [w for w in todo if w.signature in other.entries]
        for first in range(0, len(todo), AT_ONCE):
            if time.monotonic() > deadline:
                print(f"out of time: {len(todo) - first} operators were not visited")
                break
            visit(todo[first : first + AT_ONCE], args.core, measure, args.points, args.steps, other)
    finally:
        measure.close()
    return 0


def measure_for(target: DeviceTarget, prefix: Sequence[str], niceness: int) -> Measure:
    """Return a measure for `target`: cycles if this machine runs its code, else counts under emulation."""
    if target.arch == "x86_64":
        from benchmarks.shipped_records.cycles import Cycles

        return Cycles(target, prefix, niceness)
    from benchmarks.shipped_records.emulated import Emulated

    return Emulated(target, niceness=niceness)


def visit(
    todo: Sequence[Operator],
    core: str,
    measure: Measure,
    most: int,
    steps: int,
    other: CoreRecords | None,
) -> None:
    """Search a few operators together, and write the decisions that proved better to the core's records.

    Parameters
    ----------
    todo
        The operators.
    core
        The core whose records are written.
    measure
        Measures points.
    most, steps
        Limits of each search: points, and steps.
    other
        Records of another core, to try only their points; None to search.
    """
    known = CoreRecords.read(core)
    walks = [Descent(w.tasks[0].space, most, seeds(w, (known, other))) for w in todo]
    for _ in range(steps):
        proposed = [
            (w, walk, points)
            for w, walk in zip(todo, walks, strict=True)
            if (points := next_points(walk, other))
        ]
        if not proposed:
            break
        costs = measure.costs([(w.tasks[0], points) for w, _, points in proposed])
        for (_, walk, _), found in zip(proposed, costs, strict=True):
            walk.learn(found)
    better = [(w, walk) for w, walk in zip(todo, walks, strict=True) if is_promising(walk)]
    verdicts = measure.verdicts([(w.tasks, walk.best) for w, walk in better])
    entries = dict(known.entries)
    summaries = {}
    for w in todo:
        entries.pop(w.signature, None)
    for (w, walk), verdict in zip(better, verdicts, strict=True):
        summaries[w.signature] = f"{walk.space.describe(walk.best)}: {verdict.summary}"
        if verdict.holds:
            entries[w.signature] = ShippedEntry(
                named(w.tasks[0], walk.best),
                named(w.tasks[0], walk.space.default),
                float(f"{verdict.gain:.3g}"),
                w.models,
            )
    for w, walk in zip(todo, walks, strict=True):
        kept = "kept" if w.signature in entries else "-"
        text = summaries.get(w.signature, "nothing better")
        print(
            f"{100 * w.share:5.1f}% {kept:4} {walk.space.describe(walk.space.default):>9} -> {text} "
            f"[{len(walk.costs)} points] {w.signature}",
            flush=True,
        )
    cpu = todo[0].tasks[0].space.target.cpu
    made = datetime.now(UTC).date().isoformat()
    records = replace(known, cpu=cpu, measure=measure.sentence, made=made, entries=entries)
    (FOLDER / f"{core}.json").write_text(records.to_text())


def next_points(walk: Descent, other: CoreRecords | None) -> list[Decisions]:
    """Return what the search proposes; with records of another core, only their point and the heuristic's."""
    if other is None:
        return walk.propose()
    return [] if walk.costs else [d for d in walk.seeds if d not in walk.costs]


def is_promising(walk: Descent) -> bool:
    """Whether the best point is so much better that a more careful comparison is worthwhile."""
    best, default = walk.costs.get(walk.best), walk.costs.get(walk.space.default)
    return bool(
        best and default and walk.best != walk.space.default and default >= best * (LEAST_GAIN - 0.01)
    )


def seeds(w: Operator, sources: Sequence[CoreRecords | None]) -> list[Decisions]:
    """Return the points that `sources` have for an operator."""
    space, found = w.tasks[0].space, list[Decisions]()
    for records in sources:
        entry = records.entries.get(w.signature) if records is not None else None
        point = None if entry is None else point_of(entry, space)
        if point is not None:
            found.append(point)
    return found


def named(task: Task, decisions: Decisions) -> dict[str, int]:
    """Return a point as its decisions' names and values."""
    space = task.space
    return {n: v[i] for n, v, i in zip(space.names, space.values, decisions, strict=True)}


if __name__ == "__main__":
    sys.exit(main())
