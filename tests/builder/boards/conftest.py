"""Kernels to measure."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from builder import load
from builder.boards.measuring_process import BuiltKernel
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import CandidateBuilder
from builder.tuning.tasks.extraction import extract_tasks
from tests.builder.conftest import DIGITS


@pytest.fixture(scope="session")
def kernels(
    shared_file: Callable[[str, Callable[[Path], None]], Path], device: DeviceTarget
) -> list[BuiltKernel]:
    """Four points of the task with the largest design space, built."""

    def write(path: Path) -> None:
        task = max(extract_tasks(load(DIGITS), device), key=lambda t: t.space.size)
        builder = CandidateBuilder(device, 1)
        points = [task.space.point(d) for d in list(task.space.all_decisions())[:4]]
        built = builder.build([(task, point) for point in points if point is not None])
        builder.close()
        path.write_bytes(pickle.dumps([kernel for kernel in built if isinstance(kernel, BuiltKernel)]))

    kernels: list[BuiltKernel] = pickle.loads(shared_file("kernels.pickle", write).read_bytes())
    assert len(kernels) == 4
    return kernels
