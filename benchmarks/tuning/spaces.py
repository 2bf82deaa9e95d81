"""Compares our search with all points of its space, and our spaces with MetaSchedule's default space.

Up to a thousand points of an operator's space are measured once. The search is then replayed on these
measurements, as if it took them itself: 60 trials with each of several seeds. Finally the best point is
measured in turn with the best that MetaSchedule finds.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx

from benchmarks.tuning.cycle_board import cycle_board
from benchmarks.tuning.operators import OPERATORS, Operator
from builder import RunnerOptions, extract_tasks, load, resolve
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import BuiltKernel
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.search import strategies

MOST: Final = 1000
TRIALS: Final = 60
BATCH: Final = 8
SEEDS: Final = range(5)
Times = dict[Decisions, float | None]


def compare_spaces(
    names: Sequence[str] | None, metaschedule_trials: int, runner: RunnerOptions, rounds: int
) -> None:
    """Compare operators one after the other, and print the figures of each."""
    os.environ["TVM_NUM_THREADS"] = "1"
    board, builder = cycle_board(runner), CandidateBuilder(resolve("host"))
    try:
        for name in names or OPERATORS:
            task = _task(OPERATORS[name])
            times = _measure_all(task, board, builder)
            best = min(s for s in times.values() if s is not None)
            rate = task.flops / best / 1e9
            reached = [best / _replay(task, times, "xgb", seed) for seed in SEEDS]
            chance = [best / _replay(task, times, "random", seed) for seed in SEEDS]
            print(
                f"{name}: best of {len(times)} points {best * 1e6:.1f} us ({rate:.0f} GFLOP/s), untuned "
                f"{best / (times[task.space.default] or best):.3f} of its rate; {TRIALS} trials reach "
                f"{min(reached):.3f} to {max(reached):.3f} (random {min(chance):.3f} to {max(chance):.3f})",
                flush=True,
            )
            if metaschedule_trials:
                _against_metaschedule(name, task, times, metaschedule_trials, board, builder, rounds)
    finally:
        builder.close()
        board.close()


def _task(operator: Operator) -> Task:
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, f"{operator.name}.onnx")
        onnx.save(operator.model(), path)
        return max(extract_tasks(load(path), "host"), key=lambda task: task.flops)


def _measure_all(task: Task, board: LocalBoard, builder: CandidateBuilder) -> Times:
    points = list(task.space.all_decisions())
    if len(points) > MOST:
        points = [task.space.default, *random.Random(0).sample(points, MOST - 1)]
    times: Times = {}
    for first in range(0, len(points), BATCH):
        found = [p for d in points[first : first + BATCH] if (p := task.space.point(d)) is not None]
        built = builder.build([(task, point) for point in found])
        codes = [code for code in built if isinstance(code, BuiltKernel)]
        outcomes = iter(board.measure(codes))
        for point, code in zip(found, built, strict=True):
            seconds = next(outcomes).seconds if isinstance(code, BuiltKernel) else None
            times[point.decisions] = min(seconds) if seconds else None
    return times


def _replay(task: Task, times: Times, tuner: str, seed: int) -> float:
    """Return the best time, in seconds, that a search finds in `TRIALS` trials."""
    default = task.space.default
    known: Times = {default: times[default]}
    run = strategies.start(tuner, task, known, TRIALS, BATCH, seed)
    while len(known) < TRIALS and (points := run.propose(min(BATCH, TRIALS - len(known)))):
        results = [times.get(point.decisions) for point in points]
        known.update(zip((point.decisions for point in points), results, strict=True))
        run.learn(points, results)
    return min(s for s in known.values() if s is not None)


def _against_metaschedule(
    name: str,
    task: Task,
    times: Times,
    trials: int,
    board: LocalBoard,
    builder: CandidateBuilder,
    rounds: int,
) -> None:
    from benchmarks.tuning.metaschedule import tune

    theirs = tune(OPERATORS[name], resolve("host"), trials)
    point = task.space.point(min((d for d, s in times.items() if s), key=lambda d: times[d] or 0.0))
    assert point is not None
    ours = builder.build([(task, point)])[0]
    if theirs.code is None or not isinstance(ours, BuiltKernel):
        print(
            f"{name}: nothing to compare ({ours if isinstance(ours, str) else 'MetaSchedule found nothing'})"
        )
        return
    ratios = []
    for _ in range(rounds):
        mine, other = (outcome.seconds for outcome in board.measure([ours, theirs.code]))
        if mine and other:
            ratios.append(min(other) / min(mine))
    print(
        f"{name}: {statistics.median(ratios):.2f} times as fast as the best of {theirs.trials} trials in "
        f"MetaSchedule's default space ({theirs.seconds / 60:.1f} min)",
        flush=True,
    )
