"""The local board, with real kernels."""

from __future__ import annotations

import time

from builder.boards.local_board import LocalBoard
from builder.boards.measuring_process import BuiltKernel, RunnerOptions

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
    board = LocalBoard(RunnerOptions(number=1, repeat=3, min_repeat_ms=0, cooldown_ms=60_000, timeout_s=1))
    start = time.monotonic()
    measurements = board.measure(kernels[:2])
    assert ["no answer within 1 s" in (m.error or "") for m in measurements] == [True, True]
    # Unlimited, they would take 360 s; loading TVM twice takes up to a minute on a busy machine.
    assert time.monotonic() - start < 300
    board.close()
