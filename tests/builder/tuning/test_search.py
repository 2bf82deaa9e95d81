from __future__ import annotations

from typing import Any

import pytest

from builder.errors import RecordsError
from builder.tuning.search import TUNERS, start
from builder.tuning.tasks import Task


def _cost(decisions: Any) -> float:
    return 1e-5 * (1 + sum((a - b) ** 2 for a, b in zip(decisions, (1, 2, 1), strict=False)))


@pytest.fixture
def task(tasks: tuple[Task, ...]) -> Task:
    return max(tasks, key=lambda t: t.space.size)


@pytest.mark.parametrize("tuner", TUNERS)
def test_every_tuner_visits_the_whole_space_once(task: Task, tuner: str) -> None:
    known = {task.space.default: _cost(task.space.default)}
    search = start(tuner, task, known, task.space.size, 8, seed=0)
    seen = set(known)
    while points := search.propose(8):
        assert len(points) <= 8
        for point in points:
            assert point.decisions not in seen
            seen.add(point.decisions)
        search.learn(points, [_cost(p.decisions) for p in points])
    assert seen == {d for d in task.space.all_decisions() if task.space.point(d) is not None}


@pytest.mark.parametrize("tuner", ["xgb", "ga", "random"])
def test_points_that_failed_do_not_stop_a_search(task: Task, tuner: str) -> None:
    search = start(tuner, task, {}, 24, 8, seed=1)
    found = 0
    for _ in range(3):
        points = search.propose(8)
        found += len(points)
        search.learn(points, [None if p.decisions[-1] == 0 else _cost(p.decisions) for p in points])
    assert found >= 12


def test_the_same_seed_searches_the_same(task: Task) -> None:
    def visited() -> list[Any]:
        search = start("random", task, {}, 16, 8, seed=3)
        points = search.propose(8)
        return [p.decisions for p in points]

    assert visited() == visited()


def test_recorded_points_are_never_proposed(task: Task) -> None:
    known = {d: _cost(d) for d in list(task.space.all_decisions())[::2]}
    for tuner in TUNERS:
        search = start(tuner, task, known, task.space.size, 8, seed=0)
        for _ in range(4):
            points = search.propose(8)
            assert not {p.decisions for p in points} & set(known)
            search.learn(points, [_cost(p.decisions) for p in points])


def test_unknown_tuner_is_refused(task: Task) -> None:
    with pytest.raises(RecordsError, match="--tuner"):
        start("magic", task, {}, 8, 8, seed=0)
