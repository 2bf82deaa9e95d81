from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builder.tuning.options import TuneOptions
from builder.tuning.tasks.task_run import TaskRun

DEFAULT = (0,)


def run_with(*seconds: float | None, size: int = 10, calls: int = 1) -> TaskRun:
    """Return the run of a task whose points (0,), (1,) ... took these seconds."""
    space = SimpleNamespace(size=size, default=DEFAULT)
    task: Any = SimpleNamespace(key="k", space=space, calls=calls)
    known = {(index,): s for index, s in enumerate(seconds)}
    meta = SimpleNamespace(verdicts={})
    records: Any = SimpleNamespace(measured=lambda _key: known, meta=meta)
    return TaskRun(task, records)


def test_the_best_point_is_the_fastest_that_ran() -> None:
    run = run_with(3.0, None, 1.0, 2.0)
    assert run.best == ((2,), 1.0)
    assert run.default_s == 3.0
    assert run_with(None).best is None


@pytest.mark.parametrize(
    ("trials", "size", "under_way", "wanted"),
    [(64, 100, 0, 8), (6, 100, 0, 4), (64, 5, 0, 3), (6, 100, 3, 1), (2, 100, 0, 0), (2, 100, 5, 0)],
)
def test_a_batch_stays_within_trials_and_space_and_counts_what_is_under_way(
    trials: int, size: int, under_way: int, wanted: int
) -> None:
    run = run_with(1.0, 2.0, size=size)
    run.under_way = under_way
    assert run.wanted(TuneOptions(trials=trials, batch=8)) == wanted


def test_an_exhausted_search_wants_no_more_points() -> None:
    run = run_with(1.0)
    run.exhausted = True
    assert run.wanted(TuneOptions()) == 0
    assert run.is_finished(TuneOptions())


@pytest.mark.parametrize(
    ("seconds", "stale"),
    [((2.0, 1.0), False), ((1.0, 2.0), False), ((1.0, 2.0, None), True), ((None,) * 5, False)],
)
def test_a_task_is_stale_after_two_points_without_a_better_one(
    seconds: tuple[float | None, ...], stale: bool
) -> None:
    run = run_with(*seconds)
    assert run.is_stale(2) is stale
    assert (run.wanted(TuneOptions(early_stopping=2)) == 0) is stale
    assert not run.is_stale(None)


def test_the_promise_is_the_time_in_the_model_and_falls_with_each_batch() -> None:
    run = run_with(4.0, 2.0, calls=3)
    assert run.promise == 6.0
    run.batches = 2
    assert run.promise == 2.0
    assert run_with(calls=3).promise == 3.0  # nothing has run: as if a call took a second
