"""How close to the best known speed a search comes without the heuristic.

Every search starts at the middle of its space instead of at the heuristic's point. After the given time,
three kernels of each operator are measured in turn: the middle, the one that was found, and the best known
(what compiling uses, or the best of a folder of records). `recovered` is the share of the way from the middle
to the best known that the search has covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tuning.cycle_board import cycle_board
from builder import RunnerOptions, TuneOptions, extract_tasks, load, resolve, tune
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import BuiltKernel
from builder.kernels.decisions import middle
from builder.kernels.design_space import Decisions
from builder.records.best_records import chosen
from builder.records.folder import Records
from builder.records.task import Task
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.verdicts.paired_timing import compare_kernels


@dataclass(frozen=True, slots=True)
class Row:
    """An operator's times.

    Attributes
    ----------
    name
        Its kernel.
    points
        The number of points that the search measured.
    middle_s, found_s, best_s
        Seconds of all its calls in one inference, at each of the three points.
    """

    name: str
    points: int
    middle_s: float
    found_s: float
    best_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """The times of all operators of a model."""

    rows: tuple[Row, ...]

    @property
    def recovered(self) -> float:
        """1 if the found kernels are as fast as the best known, 0 if they are as slow as the middle."""
        middle_s, found_s, best_s = (
            math.fsum(getattr(row, name) for row in self.rows) for name in ("middle_s", "found_s", "best_s")
        )
        return (middle_s - found_s) / (middle_s - best_s)

    def table(self) -> str:
        """Return a line for each operator, the slowest at the middle first, and their sum."""
        lines = ["   middle us    found us     best us  points  operator"]
        rows = sorted(self.rows, key=lambda r: -r.middle_s)
        lines += [
            f"{r.middle_s * 1e6:12.1f}{r.found_s * 1e6:12.1f}{r.best_s * 1e6:12.1f}{r.points:8d}  {r.name}"
            for r in rows
        ]
        total = [math.fsum(getattr(r, n) for r in rows) * 1e6 for n in ("middle_s", "found_s", "best_s")]
        points = sum(r.points for r in rows)
        lines.append("".join(f"{t:12.1f}" for t in total) + f"{points:8d}  in all")
        return "\n".join([*lines, f"recovered {self.recovered:.1%}"])


def recover(
    path: Path, folder: Path, minutes: float, runner: RunnerOptions, known: Path | None, pairs: int
) -> Recovery:
    """Search from the middle, and compare what was found.

    Parameters
    ----------
    path
        The model.
    folder
        Gets the search's records.
    minutes
        How long to search.
    runner
        How kernels are measured.
    known
        A folder with the best known records; None for what compiling uses.
    pairs
        Pairs of measurements in a comparison.
    """
    model, device = load(path), resolve("host")
    options = TuneOptions(time_limit_s=minutes * 60, trials=1000, pairs=0)
    records = tune(
        model, device, folder, options=options, runner=runner, choose=middle, boards=cycle_board(runner)
    )
    best_known = Records.read(known, device) if known is not None else None
    blank = {task.key: task for task in extract_tasks(model, device, choose=middle)}
    rows = []
    board, builder = cycle_board(runner), CandidateBuilder(device)
    try:
        for task in extract_tasks(model, device):
            from_middle = blank[task.key].space.default
            best = _best(task, best_known)
            found = records.best(task.key)[0].decisions if records.best(task.key) else from_middle
            times = _times(task, [from_middle, found, best], board, builder, runner, pairs)
            middle_s, found_s, best_s = (seconds * task.calls for seconds in times)
            rows.append(Row(task.name, len(records.measured(task.key)), middle_s, found_s, best_s))
    finally:
        builder.close()
        board.close()
    return Recovery(tuple(rows))


def _best(task: Task, known: Records | None) -> Decisions:
    record = chosen(known, task.key) if known is not None else None
    return task.space.default if record is None else record.decisions


def _times(
    task: Task,
    points: list[Decisions],
    board: LocalBoard,
    builder: CandidateBuilder,
    runner: RunnerOptions,
    pairs: int,
) -> list[float]:
    """Return the seconds of a call at each point; the first is measured in turn with each of the others."""
    candidates = [task.space.point(decisions) for decisions in points]
    codes = builder.build([(task, point) for point in candidates if point is not None])
    first, *others = [code for code in codes if isinstance(code, BuiltKernel)]
    assert len(others) == len(points) - 1, codes
    ratios = [compare_kernels(board, first, other, pairs, runner) for other in others]
    before = min(ratio.untuned_us for ratio in ratios) / 1e6
    return [before, *(before / ratio.speedup for ratio in ratios)]
