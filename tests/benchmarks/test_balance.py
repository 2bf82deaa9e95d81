"""The bound of a model's speed-up, by counting rounds of parallel loops."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.balance import Balance, Part, lost_us
from tests.patience import PROGRAM_PATIENCE_S


def test_the_thread_with_the_most_rounds_and_the_rest_decide() -> None:
    kernel = Balance((Part(6, 60.0), Part(1, 10.0)))
    assert kernel.time_us == 70.0
    assert kernel.time_us_with(4) == 2 * 10.0 + 10.0
    assert lost_us(kernel, 4) == pytest.approx(30.0 - 17.5)


@pytest.mark.slow
def test_the_report_of_a_network() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.balance",
        "slim-320",
        "--target",
        "rpi4",
        "--threads",
        "1",
        "4",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_PATIENCE_S, check=True)
    one, four, header, *kernels = done.stdout.splitlines()
    assert one == "1 threads: at most 1.00 times as fast as one"
    assert 3.5 < float(four.split()[4]) <= 4.0
    assert header.split()[:3] == ["lost", "us", "calls"]
    assert len(kernels) == 10
    assert float(kernels[0].split()[0]) >= float(kernels[-1].split()[0])
