from __future__ import annotations

import numpy as np
import pytest

from agent.runtime.benchmark import BenchmarkResult, time_calls


def test_a_timing_result_is_in_seconds_and_prints_milliseconds() -> None:
    result = BenchmarkResult((0.001, 0.002, 0.006))
    assert result.mean == pytest.approx(0.003)
    assert (result.median, result.min, result.max) == (0.002, 0.001, 0.006)
    assert result.std == pytest.approx(np.std([0.001, 0.002, 0.006]))
    assert str(result) == (
        "Execution time summary:\n"
        " mean (ms)   median (ms)    max (ms)     min (ms)     std (ms)\n"
        "   3.0000       2.0000       6.0000       1.0000       2.1602"
    )


def test_a_repeat_lasts_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    calls = [0]

    def call() -> None:
        calls[0] += 1
        now[0] += 0.001

    result = time_calls(call, number=1, repeat=2, min_repeat_ms=10)
    # One to warm up, one that is too short, then two repeats of eleven.
    assert calls[0] == 1 + 1 + 11 + 11
    np.testing.assert_allclose(result.results, 0.001)
    with pytest.raises(ValueError, match="at least 1"):
        time_calls(call, number=0, repeat=1)


def test_a_call_that_takes_no_time_is_not_repeated_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    calls = [0]

    def call() -> None:
        calls[0] += 1

    time_calls(call, number=1, repeat=1, min_repeat_ms=1, limit_zero_time_iterations=5)
    assert calls[0] < 100
