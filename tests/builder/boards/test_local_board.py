"""The local board, with real kernels, and with a CPU that throttles."""

from __future__ import annotations

import time
from typing import Any

import pytest

from builder.boards.interface import COOL_S, INVALID_ATTEMPTS, Measurement
from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import BoardAddress, BuiltKernel, RunnerOptions, Timing
from builder.boards.remote_functions import BoardState
from builder.records.meta_json import BoardTime
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

OPTIONS = RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=20)


def test_this_machine_measures(kernels: list[BuiltKernel]) -> None:
    board = LocalBoard(OPTIONS)
    measurements = board.measure(kernels)
    assert [m.error for m in measurements] == [None] * len(kernels)
    assert all(m.seconds and len(m.seconds) == 2 and min(m.seconds) > 0 for m in measurements)
    assert board.take_times()["local"].measured == len(kernels)
    board.close()


def test_a_candidate_that_does_not_load_is_its_own_fault(kernels: list[BuiltKernel]) -> None:
    board = LocalBoard(OPTIONS)
    broken, whole = board.measure([BuiltKernel(b"not a shared object", kernels[0].arguments), kernels[0]])
    assert broken.seconds is None
    assert "shared library" in (broken.error or "")
    assert whole.error is None
    board.close()


def test_a_candidate_over_its_time_is_killed_and_the_next_measured(kernels: list[BuiltKernel]) -> None:
    pause_ms = int(10_000 * PROGRAM_PATIENCE_S)
    board = LocalBoard(RunnerOptions(number=1, repeat=3, min_repeat_ms=0, cooldown_ms=pause_ms, timeout_s=1))
    start = time.monotonic()
    measurements = board.measure(kernels[:2])
    assert ["no answer within 1 s" in (m.error or "") for m in measurements] == [True, True]
    # Unlimited, they would pause for longer. Loading TVM twice takes up to a minute on a busy machine.
    assert time.monotonic() - start < PROGRAM_PATIENCE_S
    board.close()


class ThrottlingProcess:
    """Measures at once, and reports a CPU that throttles for the first `count` measurements."""

    def __init__(self, count: int) -> None:
        self.address: BoardAddress | None = None
        self._left = count

    def open(self, address: BoardAddress, timeout_s: float) -> BoardState:
        del timeout_s
        self.address = address
        return BoardState()

    def measure(self, kernel: BuiltKernel, options: RunnerOptions) -> Timing:
        del kernel, options
        self._left -= 1
        return Timing((1e-6,), BoardState(throttled=self._left >= 0))


@pytest.mark.parametrize("count", range(INVALID_ATTEMPTS))
def test_a_measurement_under_throttling_is_repeated_after_a_pause(count: int) -> None:
    process: Any = ThrottlingProcess(count)
    pauses: list[float] = []
    board = LocalBoard(OPTIONS, process, sleep=pauses.append)
    assert board.measure([BuiltKernel(b"", ())]) == [Measurement((1e-6,), None, "local")]
    assert pauses == [COOL_S] * count
    times = board.take_times()["local"]
    assert times == BoardTime(times.seconds, measured=1, invalid=count)


def test_a_cpu_that_stays_throttled_spoils_the_measurement() -> None:
    process: Any = ThrottlingProcess(INVALID_ATTEMPTS)
    pauses: list[float] = []
    board = LocalBoard(OPTIONS, process, sleep=pauses.append)
    (measurement,) = board.measure([BuiltKernel(b"", ())])
    assert measurement == Measurement(None, "the CPU did not run at full speed", "local", spoilt=True)
    assert pauses == [COOL_S] * INVALID_ATTEMPTS
    assert board.take_times()["local"].invalid == INVALID_ATTEMPTS
