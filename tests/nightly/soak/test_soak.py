"""A small `make soak`: its verdicts detect broken promises, its parts run, its picture is drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from tests.nightly.soak.picture import draw
from tests.nightly.soak.steady import Sample, SteadyResult
from tests.nightly.soak.trials import FAULTS, FULL_REQUESTS, TrialResult, times_for
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
GOOD = TrialResult("broker", "broker restarted", 1000, 10, 1.0, 1003, 2, {200: 1000}, [])


def test_faults_at_full_size_are_as_many_as_promised() -> None:
    times = {fault.name: times_for(fault, FULL_REQUESTS) for fault in FAULTS}
    assert times["broker"] == times["broker-forgets"] == 100
    assert times["worker"] == 200
    assert times["agent"] == 50
    assert times_for(FAULTS[0], 10) == 2


@pytest.mark.parametrize(
    "broken",
    [
        replace(GOOD, wrong=["7: two answers, 200 and 200"]),
        replace(GOOD, statuses={200: 999}),
        replace(GOOD, statuses={200: 999, 500: 1}),
        replace(GOOD, fault="worker", statuses={200: 989, 500: 11}),
    ],
)
def test_broken_promise_is_detected(broken: TrialResult) -> None:
    assert GOOD.passed
    assert replace(GOOD, fault="worker", statuses={200: 990, 500: 10}).passed
    assert not broken.passed


def steady(rss: list[int], threads: list[int]) -> SteadyResult:
    samples = [
        Sample(10.0 * number, "agent", size, count, 12)
        for number, (size, count) in enumerate(zip(rss, threads, strict=True))
    ]
    return SteadyResult(10.0 * len(rss), 100, Counter({200: 100}), 0, samples)


def test_growth_is_detected_but_not_during_warm_up() -> None:
    flat = [30 * MIB] * 4 + [40 * MIB] * 16
    assert steady(flat, [1] * 20).passed
    assert not steady([40 * MIB + number * MIB // 5 for number in range(20)], [1] * 20).passed
    assert not steady(flat, [1] * 10 + [2] * 10).passed
    unanswered = steady(flat, [1] * 20)
    unanswered.unanswered = 1
    assert not unanswered.passed


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a worker's file descriptors are shown to root only")
def test_soak_of_a_few_seconds_prints_a_table_and_writes_a_report(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.nightly.soak", "--requests", "300", "--minutes", "0.1"]
    chosen = ["--only", "worker", "steady", "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "worker SIGKILLed" in done.stdout, done.stderr
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["steady"] is not None, done.stderr
    # Six seconds are too short for a verdict on growth.
    assert done.returncode == int(not document["steady"]["passed"])
    [trial] = document["faults"]
    assert (trial["requests"], trial["faults"], trial["wrong"], trial["passed"]) == (300, 2, [], True)
    assert document["steady"]["requests"] > 0
    assert {verdict["what"] for verdict in document["steady"]["verdicts"]} == {
        "rss_bytes",
        "threads",
        "descriptors",
    }
    with Image.open(tmp_path / "soak.png") as picture:
        assert picture.size == (1000, 690)
        assert len(picture.getcolors(1 << 20) or []) > 10


def test_picture_without_samples_is_drawn(tmp_path: Path) -> None:
    draw(SteadyResult(), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 0
