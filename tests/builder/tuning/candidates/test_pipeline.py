"""The pipeline with builders and boards that a test controls step by step: no sleeping, no timing."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from builder.boards.interface import Measurement
from builder.boards.measuring_process import BuiltKernel
from builder.errors import FleetError
from builder.tuning.candidates.candidate_builder import Building
from builder.tuning.candidates.pipeline import AHEAD, Pipeline
from builder.tuning.interruption import Interruption
from tests.patience import PATIENCE_S

MEASURED = Measurement((1e-6,), None, "board")


class Builder:
    """Builds at once and notes each candidate in `events`; candidates numbered in `fail` do not compile."""

    def __init__(self, events: list[str], fail: tuple[int, ...] = ()) -> None:
        self._events, self._fail = events, fail

    def start(self, jobs: Any) -> Building:
        futures: list[Future[bytes]] = []
        for index, _ in enumerate(jobs):
            future: Future[bytes] = Future()
            if index in self._fail:
                future.set_exception(ValueError("no code for it"))
            else:
                future.set_result(b"")
            futures.append(future)
            self._events.append("built")
        return Building([()] * len(jobs), futures, b"".join)


class Boards:
    """Boards that measure the candidate for which a test releases a permit."""

    def __init__(self, events: list[str] | None = None, *, elsewhere: bool = True) -> None:
        self.elsewhere = elsewhere
        self.permits = threading.Semaphore(0)
        self.started: queue.Queue[int] = queue.Queue()  # sizes of the batches whose measurement began
        self._events = events if events is not None else []

    def measure(self, kernels: Any, done: Callable[[int, Measurement], None] | None = None) -> list[Any]:
        self.started.put(len(kernels))
        for index, kernel in enumerate(kernels):
            assert isinstance(kernel, BuiltKernel)
            assert self.permits.acquire(timeout=PATIENCE_S)
            self._events.append("measured")
            assert done is not None
            done(index, MEASURED)
        return []


@dataclass
class Run:
    task: Any = None


def jobs(count: int) -> Any:
    return [(Run(), None)] * count


def test_the_next_batches_are_built_while_the_first_is_measured() -> None:
    events: list[str] = []
    boards = Boards(events)
    pipeline = Pipeline(Builder(events), boards, Interruption())  # type: ignore[arg-type]
    for _ in range(AHEAD):
        assert not pipeline.is_full
        pipeline.put(jobs(2))
    assert pipeline.is_full
    assert events == ["built"] * 2 * AHEAD
    boards.permits.release(2 * AHEAD)
    for _ in range(2 * AHEAD):
        pipeline.take()
    assert pipeline.is_empty


def test_two_batches_are_offered_to_the_boards_at_the_same_time() -> None:
    """So that no board is idle while another one measures the last candidate of a batch."""
    boards = Boards()
    pipeline = Pipeline(Builder([]), boards, Interruption())  # type: ignore[arg-type]
    pipeline.put(jobs(1))
    pipeline.put(jobs(1))
    assert [boards.started.get(timeout=PATIENCE_S) for _ in range(2)] == [
        1,
        1,
    ]  # and neither has a permit yet
    boards.permits.release(2)
    for _ in range(2):
        pipeline.take()


def test_on_this_machine_nothing_is_built_while_something_is_measured() -> None:
    events: list[str] = []
    boards = Boards(events, elsewhere=False)
    pipeline = Pipeline(Builder(events), boards, Interruption())  # type: ignore[arg-type]
    boards.permits.release(6)
    for _ in range(2):
        pipeline.put(jobs(3))
        assert pipeline.is_full
        for _ in range(3):
            assert pipeline.is_full
            pipeline.take()
        assert pipeline.is_empty
    assert events == (["built"] * 3 + ["measured"] * 3) * 2


def test_a_measurement_on_this_machine_waits_for_work_that_would_disturb_it() -> None:
    boards = Boards(elsewhere=False)
    boards.permits.release(1)
    pipeline = Pipeline(Builder([]), boards, Interruption())  # type: ignore[arg-type]
    with pipeline.calm:
        pipeline.put(jobs(1))
        with pytest.raises(queue.Empty):
            boards.started.get(timeout=0.1)
    assert boards.started.get(timeout=PATIENCE_S) == 1
    pipeline.take()


def test_a_candidate_that_does_not_compile_is_a_failed_measurement() -> None:
    boards = Boards()
    pipeline = Pipeline(Builder([], fail=(1,)), boards, Interruption())  # type: ignore[arg-type]
    pipeline.put(jobs(3))
    boards.permits.release(2)
    results = {index: measurement for _, index, measurement in (pipeline.take() for _ in range(3))}
    assert [results[i].error for i in range(3)] == [None, "no code for it", None]
    assert pipeline.is_empty


def test_after_ctrl_c_the_candidate_being_measured_is_the_last() -> None:
    class EndsAfterStop(Boards):
        """Its third candidate ends only when the pipeline has been stopped."""

        def measure(self, kernels: Any, done: Callable[[int, Measurement], None] | None = None) -> list[Any]:
            assert done is not None
            for index in range(len(kernels)):
                if index == 2:
                    third.set()
                    assert pipeline._stop.wait(PATIENCE_S)
                done(index, MEASURED)
            return []

    third, interruption = threading.Event(), Interruption()
    pipeline = Pipeline(Builder([]), EndsAfterStop(), interruption)  # type: ignore[arg-type]
    pipeline.put(jobs(20))
    pipeline.take()
    assert third.wait(PATIENCE_S)
    interruption.on_signal(2, None)
    with pytest.raises(KeyboardInterrupt):
        pipeline.take()
    assert [index for _, index, _ in pipeline.drain(PATIENCE_S)] == [1, 2]


def test_boards_that_are_gone_end_the_run() -> None:
    class Gone(Boards):
        def measure(self, kernels: Any, done: Any = None) -> list[Any]:
            del kernels, done
            raise FleetError("gone", hint="wait")

    pipeline = Pipeline(Builder([]), Gone(), Interruption())  # type: ignore[arg-type]
    pipeline.put(jobs(1))
    with pytest.raises(FleetError, match="gone"):
        pipeline.take()
