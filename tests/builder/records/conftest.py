"""A folder of records with three measured points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from builder.kernels.design_space import Decisions, Point
from builder.records.folder import Records
from builder.records.task import Task
from builder.target.device_target import DeviceTarget


@pytest.fixture
def task(tasks: tuple[Task, ...]) -> Task:
    """The task with the largest design space."""
    return max(tasks, key=lambda t: t.space.size)


@pytest.fixture
def folder(tmp_path: Path, task: Task, device: DeviceTarget) -> Path:
    """Three measured points: slow, failed, fast."""
    path = tmp_path / "records"
    with Records.write(path, device) as records:
        fill(records, task, [[2e-5, 4e-5, 3e-5], None, [1e-5]])
    return path


def point_at(task: Task, decisions: Decisions) -> Point:
    point = task.space.point(decisions)
    assert point is not None
    return point


def others(task: Task) -> list[Decisions]:
    """Return all points but the heuristic's."""
    return [d for d in task.space.all_decisions() if d != task.space.default]


def fill(records: Records, task: Task, seconds: Sequence[Sequence[float] | None], skip: int = 0) -> None:
    """Record `seconds` for the points of `others`, from number `skip` on."""
    points = [point_at(task, d) for d in others(task)[skip : skip + len(seconds)]]
    records.append(task, zip(points, seconds, strict=True))
