"""The search for shipped records descends to a minimum, and emulation counts executed instructions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.shipped_records.builders import parallel_extents
from benchmarks.shipped_records.descent import Descent
from benchmarks.shipped_records.emulated import Emulated, read_blocks, text_of
from builder import load, resolve
from builder.kernels.decisions import heuristic
from builder.kernels.design_space import Decisions
from builder.kernels.schedule import schedule
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.tasks.extraction import extract_tasks

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits" / "digits.onnx"


@pytest.fixture(scope="module")
def rpi4() -> DeviceTarget:
    return resolve("rpi4")


@pytest.fixture(scope="module")
def task(rpi4: DeviceTarget) -> Task:
    return max(extract_tasks(load(DIGITS), rpi4, choose=heuristic), key=lambda t: t.space.size)


def walk(task: Task, cost: dict[Decisions, float], most: int = 1000) -> Descent:
    descent = Descent(task.space, most)
    while points := descent.propose():
        descent.learn({p: cost.get(p) for p in points})
    return descent


def test_the_search_ends_at_a_minimum(task: Task) -> None:
    points = list(task.space.all_decisions())
    distance = {p: sum(abs(a - b) for a, b in zip(p, task.space.default, strict=True)) for p in points}
    reachable = Descent(task.space, 1000)
    target = next(p for p in points if distance[p] == 1 and reachable._is_sane(p))
    cost = {p: 1.0 + sum(abs(a - b) for a, b in zip(p, target, strict=True)) for p in points}
    assert walk(task, cost).best == target


def test_the_search_stays_at_a_minimum_and_measures_no_point_twice(task: Task) -> None:
    cost = dict.fromkeys(task.space.all_decisions(), 2.0) | {task.space.default: 1.0}
    descent = walk(task, cost)
    assert descent.best == task.space.default
    assert len(descent.costs) < task.space.size
    assert walk(task, cost, most=3).costs.keys() <= descent.costs.keys()
    assert len(walk(task, cost, most=3).costs) == 3


def test_points_that_do_not_run_are_not_chosen(task: Task) -> None:
    assert walk(task, {task.space.default: 1.0}).best == task.space.default


def test_samples_count_for_all_iterations() -> None:
    blocks = read_blocks("0 1 1 1000:5:2\n0 112 4 1000:5:8 2000:10:4\n1 1 1 3000:7:1\n")
    assert blocks[0] == Counter({(0x1000, 5): 2 + 8 * 28, (0x2000, 10): 4 * 28})
    assert blocks[1] == Counter({(0x3000, 7): 1})


def test_branches_are_left_out_for_llvm_mca() -> None:
    lines = {0: "fmla v0.4s, v1.4s, v2.s[0]", 4: "b.ne 0x0", 8: "add x0, x0, #16", 12: "adrp x1, 0x1000"}
    assert text_of((0, 4), lines) == "fmla v0.4s, v1.4s, v2.s[0]\nadd x0, x0, #16"


def test_parallel_loops_are_found(task: Task, rpi4: DeviceTarget) -> None:
    point = task.space.point(task.space.default)
    assert point is not None
    extents = parallel_extents(point.schedule.mod["main"])
    assert extents
    assert all(extent > 1 for extent in extents)
    finished = schedule(task.workload["main"], rpi4)
    assert parallel_extents(finished) in {extents, ()}, "a small kernel stays on one core"


# Linking the emulated program builds a C library for ARM first, which takes a minute.
@pytest.mark.arm
def test_sampled_iterations_cost_as_much_as_all(task: Task, rpi4: DeviceTarget) -> None:
    sampled, whole = Emulated(rpi4), Emulated(rpi4, samples=1 << 20)
    try:
        for measure in (sampled, whole):
            (costs,) = measure.costs([(task, [task.space.default])])
            assert costs[task.space.default] is not None
    finally:
        sampled.close()
        whole.close()
    key = (task.key, task.space.default)
    few, all_ = sampled.found[key], whole.found[key]
    fewest = task.flops / 2 / rpi4.simd.lanes  # a multiply-add of a vector is one instruction
    assert fewest < all_.instructions < 4 * fewest
    assert few.instructions == pytest.approx(all_.instructions, rel=0.1)
    assert few.cycles == pytest.approx(all_.cycles, rel=0.1)
