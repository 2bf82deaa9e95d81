"""What overlaps, with builders and boards that only take their time: a busy machine changes nothing."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from builder.boards.interface import Measurement
from builder.boards.measuring_process import BuiltKernel
from builder.errors import FleetError
from builder.tuning.candidates.candidate_builder import Building
from builder.tuning.candidates.pipeline import Pipeline
from builder.tuning.interruption import Interruption

BUILD_S, MEASURE_S = 0.06, 0.1
CODE = BuiltKernel(b"", ())


class SlowBuilder:
    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        self.built: list[float] = []

    def start(self, jobs: Any) -> Building:
        return Building([()] * len(jobs), [self.pool.submit(self._build) for _ in jobs])

    def _build(self) -> bytes:
        time.sleep(BUILD_S)
        self.built.append(time.monotonic())
        return b""


class SlowBoards:
    def __init__(self, count: int, *, elsewhere: bool = True) -> None:
        self.elsewhere = elsewhere
        self.measuring: list[tuple[float, float]] = []
        self._free: queue.Queue[int] = queue.Queue()
        for board in range(count):
            self._free.put(board)

    def measure(self, codes: Any, done: Any = None) -> list[Measurement]:
        outcomes: queue.Queue[int] = queue.Queue()

        def one(index: int) -> None:
            board = self._free.get()
            start = time.monotonic()
            time.sleep(MEASURE_S)
            self.measuring.append((start, time.monotonic()))
            self._free.put(board)
            outcomes.put(index)

        for index in range(len(codes)):
            threading.Thread(target=one, args=(index,), daemon=True).start()
        for _ in codes:
            done(outcomes.get(), Measurement((1e-6,), None, "board"))
        return []


@dataclass
class Job:
    task: Any = None


def run(builder: Any, boards: Any, batches: int, size: int = 8) -> float:
    """Seconds that it takes."""
    pipeline = Pipeline(builder, boards, Interruption())
    start, left, taken = time.monotonic(), batches, 0
    while left or not pipeline.is_empty:
        while left and not pipeline.is_full:
            pipeline.put([(Job(), None)] * size)  # type: ignore[list-item]
            left -= 1
        pipeline.take()
        taken += 1
    assert taken == batches * size
    return time.monotonic() - start


def test_two_boards_do_nearly_twice_as_much_as_one() -> None:
    """0.03 s of building a candidate with two cores beside 0.05 s of measuring with two boards."""
    one, two = (run(SlowBuilder(), SlowBoards(count), 6) for count in (1, 2))
    assert one / two >= 1.8, (one, two)


def test_here_nothing_is_built_while_something_is_measured() -> None:
    builder, boards = SlowBuilder(), SlowBoards(1, elsewhere=False)
    run(builder, boards, 3, size=3)
    assert len(builder.built) == 9
    assert not [t for t in builder.built for start, end in boards.measuring if start < t - BUILD_S / 2 < end]


def test_after_ctrl_c_what_was_measured_is_handed_back() -> None:
    interruption = Interruption()
    pipeline = Pipeline(SlowBuilder(), SlowBoards(1), interruption)  # type: ignore[arg-type]
    pipeline.put([(Job(), None)] * 20)  # type: ignore[list-item]
    pipeline.take()
    interruption._handle(2, None)
    time.sleep(3 * MEASURE_S)
    with pytest.raises(KeyboardInterrupt):
        pipeline.take()
    kept = list(pipeline.drain(5.0))
    assert 1 <= len(kept) < 19


def test_boards_that_are_gone_end_the_run() -> None:
    class Gone(SlowBoards):
        def measure(self, codes: Any, done: Any = None) -> list[Measurement]:
            del codes, done
            raise FleetError("gone")

    pipeline = Pipeline(SlowBuilder(), Gone(1), Interruption())  # type: ignore[arg-type]
    pipeline.put([(Job(), None)])  # type: ignore[list-item]
    with pytest.raises(FleetError, match="gone"):
        pipeline.take()
