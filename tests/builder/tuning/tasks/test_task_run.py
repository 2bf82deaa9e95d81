from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from builder.boards.measuring_process import BuiltKernel
from builder.records.meta_json import Ratio
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


def ratio(speedup: float, low: float, pairs: int = 9) -> Ratio:
    return Ratio(2e6, 2e6 / speedup, speedup, low, 2 * speedup - low, pairs)


def test_a_point_that_seems_faster_has_no_gain_until_it_is_confirmed() -> None:
    run = run_with(2.0, 1.0, 1.5, 1.99)
    assert run.candidates == [(1,), (2,)]  # the last one is faster by less than 2 %
    assert (run.confirmed, run.gain) == (None, 1.0)
    assert not run.judge((1,), ratio(1.3, 0.9)).use
    assert (run.confirmed, run.gain) == (None, 1.0)
    assert run.candidates == [(2,)]
    assert run.judge((2,), ratio(1.2, 1.1)).use
    assert run.gain == 1.1
    assert run.candidates == []


def test_of_confirmed_points_the_one_with_the_larger_gain_is_kept() -> None:
    run = run_with(2.0, 1.0, 1.1, 1.2)
    run.judge((1,), ratio(1.3, 1.2))
    assert run.judge((2,), ratio(1.2, 1.1)).decisions == (1,)
    assert run.judge((3,), ratio(1.5, 1.1)).decisions == (3,)
    assert not run.judge((3,), ratio(1.0, 0.9, pairs=21)).use  # the comparison at the end decides
    assert run.confirmed is None


def test_the_heuristics_kernel_and_the_fastest_are_kept_for_comparisons() -> None:
    run = run_with(9.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    for decisions in run.known:
        run.keep(decisions, BuiltKernel(b"", ()))
    assert set(run.kernels) == {DEFAULT, (3,), (4,), (5,)}
