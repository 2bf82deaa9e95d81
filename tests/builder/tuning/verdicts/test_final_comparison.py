"""Verdicts over real records, with boards that return the times that a test chose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.boards.measuring_process import BuiltKernel, RunnerOptions
from builder.errors import BoardError
from builder.importer import ImportedModel
from builder.records.best_records import chosen
from builder.records.folder import Records
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.context import TuningContext
from builder.tuning.options import TuneOptions
from builder.tuning.tasks.task_run import TaskRun
from builder.tuning.verdicts.final_comparison import FINALISTS, FinalComparison
from builder.tuning.verdicts.paired_timing import ATTEMPTS
from tests.builder.records.conftest import others, point_at

pytestmark = pytest.mark.slow


class Builder:
    """Builds nothing: the first kernel of a comparison is empty, the others are their numbers."""

    def build(self, jobs: list[Any]) -> list[BuiltKernel]:
        return [BuiltKernel(bytes([number]), ()) for number, _ in enumerate(jobs)]


class Boards:
    """One board, on which finalist `n` is `speedups[n - 1]` times as fast as untuned; None fails."""

    def __init__(self, *speedups: float | None) -> None:
        self._speedups = speedups
        self.compared: list[int] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[tuple[str, Any]]:
        yield "board", self

    def compare(
        self, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
    ) -> list[tuple[float, float]]:
        del untuned, options
        number = tuned.content[0]
        self.compared.append(number)
        speedup = self._speedups[number - 1]
        if speedup is None:
            raise BoardError("the board went away")
        return [(speedup * (1 + 0.01 * (i % 3)), 1.0) for i in range(pairs)]


class Notes:
    """A view that keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, progress: object) -> None:
        """Ignore the progress."""

    def note(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def task(tasks: tuple[Task, ...]) -> Task:
    return max(tasks, key=lambda t: t.space.size)


@pytest.fixture
def records(tmp_path: Path, task: Task, device: DeviceTarget) -> Iterator[Records]:
    """The heuristic's point, and four faster ones, the fastest last."""
    with Records.write(tmp_path / "records", device) as records:
        records.append(task, [(point_at(task, task.space.default), [9e-6])])
        points = [d for d in others(task) if task.space.point(d) is not None][:4]
        records.append(task, [(point_at(task, d), [(8 - i) * 1e-6]) for i, d in enumerate(points)])
        yield records


def compare(
    digits: ImportedModel, device: DeviceTarget, records: Records, task: Task, boards: Boards
) -> Notes:
    notes = Notes()
    builder: Any = Builder()
    any_boards: Any = boards
    options, runner = TuneOptions(pairs=5), RunnerOptions()
    context = TuningContext(digits, device, records, builder, any_boards, options, runner, notes)
    FinalComparison(context).compare_operator(TaskRun(task, records))
    return notes


def test_the_first_finalist_that_is_faster_beyond_doubt_is_used(
    digits: ImportedModel, device: DeviceTarget, records: Records, task: Task
) -> None:
    boards = Boards(0.9, 1.2, 1.5)
    compare(digits, device, records, task, boards)
    assert boards.compared == [1, 2]
    verdict = records.meta.verdicts[task.key]
    assert verdict.use
    assert verdict.decisions == records.best(task.key, 2)[1].decisions
    assert verdict.ratio.low > 1.0
    used = chosen(records, task.key)
    assert used is not None
    assert used.decisions == verdict.decisions


def test_without_a_faster_finalist_the_heuristic_stays(
    digits: ImportedModel, device: DeviceTarget, records: Records, task: Task
) -> None:
    boards = Boards(1.0, 0.99, 0.9)
    compare(digits, device, records, task, boards)
    assert boards.compared == [1, 2, 3]
    assert len(boards.compared) == FINALISTS
    assert not records.meta.verdicts[task.key].use
    assert chosen(records, task.key) is None


def test_a_point_that_is_in_use_is_not_compared_again(
    digits: ImportedModel, device: DeviceTarget, records: Records, task: Task
) -> None:
    compare(digits, device, records, task, Boards(1.5))
    again = Boards()
    compare(digits, device, records, task, again)
    assert again.compared == []


def test_boards_that_fail_give_no_verdict_but_notes(
    digits: ImportedModel, device: DeviceTarget, records: Records, task: Task
) -> None:
    boards = Boards(None, None, None)
    notes = compare(digits, device, records, task, boards)
    assert boards.compared == [number for number in (1, 2, 3) for _ in range(ATTEMPTS)]
    assert task.key not in records.meta.verdicts
    assert notes.lines == [
        *[f"task {task.index} could not be compared: the board went away"] * FINALISTS,
        f"task {task.index} has no new verdict: no point could be compared with the heuristic's",
    ]
