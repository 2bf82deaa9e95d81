"""Kernels to measure."""

from __future__ import annotations

import pytest

from builder.boards.measuring_process import BuiltKernel
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import CandidateBuilder


@pytest.fixture(scope="session")
def kernels(tasks: tuple[Task, ...], device: DeviceTarget) -> list[BuiltKernel]:
    """Four points of the task with the largest design space, built."""
    task = max(tasks, key=lambda t: t.space.size)
    builder = CandidateBuilder(device, 2)
    points = [task.space.point(d) for d in list(task.space.all_decisions())[:4]]
    built = builder.build([(task, point) for point in points if point is not None])
    builder.close()
    kernels = [kernel for kernel in built if isinstance(kernel, BuiltKernel)]
    assert len(kernels) == 4
    return kernels
