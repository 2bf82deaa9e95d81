"""Points of a design space: made, read back from a trace, and described."""

from __future__ import annotations

import pytest
import tvm
from tvm import tirx

from builder.compiling.lower import lower
from builder.importer import ImportedModel
from builder.kernels.decisions import Schedules, middle
from builder.kernels.design_space import decisions_of, workload_of
from builder.kernels.schedule import SCHEDULE, schedule
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import kernel_of
from tests.builder.points import existing_point


def without_names(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return `func` without the attributes that say where it comes from."""
    return func.without_attr(SCHEDULE).with_attr("global_symbol", "f")


@pytest.mark.slow
def test_the_heuristics_point_is_the_heuristics_schedule(
    tasks: tuple[Task, ...], device: DeviceTarget
) -> None:
    for task in tasks:
        point = existing_point(task)
        with device.tvm_target:
            expected = schedule(task.space.func, device)
            found = kernel_of(point.schedule, device)["kernel"]
        tvm.ir.assert_structural_equal(without_names(found), without_names(expected))


def test_a_points_decisions_come_back_from_its_trace(tasks: tuple[Task, ...]) -> None:
    for task in tasks:
        decisions = tuple(len(values) - 1 for values in task.space.values)
        point = task.space.point(decisions)
        if point is not None:
            assert decisions_of(point.trace) == decisions


def test_points_differ_in_their_loops(tasks: tuple[Task, ...]) -> None:
    task = max(tasks, key=lambda t: t.space.size)
    seen = {existing_point(task, d).schedule.mod.script() for d in list(task.space.all_decisions())[:6]}
    assert len(seen) == 6


@pytest.mark.slow
def test_making_points_leaves_the_workload_as_it_was(tasks: tuple[Task, ...]) -> None:
    for task in tasks:
        for decisions in list(task.space.all_decisions())[:4]:
            task.space.point(decisions)
        assert workload_of(task.space.func)[1] == task.key


@pytest.mark.slow
def test_the_middle_of_each_space_is_another_schedule(digits: ImportedModel, device: DeviceTarget) -> None:
    ours, mid = lower(digits.mod, device), lower(digits.mod, device, Schedules(choose=middle))
    assert set(map(str, ours.kernels.functions)) == set(map(str, mid.kernels.functions))
    assert ours.kernels.script() != mid.kernels.script()


def test_decisions_are_described_by_their_values(tasks: tuple[Task, ...]) -> None:
    assert any(len(task.space.values) > 1 for task in tasks)
    for task in tasks:
        values = zip(task.space.values, task.space.default, strict=True)
        words = "x".join(str(value[index]) for value, index in values)
        assert task.space.describe(task.space.default) == words
