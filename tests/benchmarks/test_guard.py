"""The guard notices kernels that got slower, and the present kernels pass it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.guard import ARM, MODELS, X86, Count, count, prepare, recorded, regressions
from benchmarks.instructions.emulator import AGENT_PACKAGES, Emulator
from tests.needs import missing_to_count

BEFORE = Count({"conv2d": 1_000_000, "depthwise": 100_000, "other": 1_000}, 2_000_000)
# CI has all of them; elsewhere the test is skipped, and the reason names the missing ones.
MISSING = missing_to_count()


def test_every_network_is_recorded_for_every_core() -> None:
    assert set(recorded()) == {(model, core) for model in MODELS for core in guard.TARGETS}


def test_a_kind_that_got_16_percent_worse_is_named() -> None:
    worse = Count({**BEFORE.kinds, "depthwise": 116_000}, BEFORE.onnxruntime)
    assert regressions("small", worse, BEFORE) == [
        "small: depthwise takes 116000 steps, 100000 when it was recorded"
    ]


def test_14_percent_are_allowed() -> None:
    worse = Count({kind: int(number * 1.14) for kind, number in BEFORE.kinds.items()}, BEFORE.onnxruntime)
    assert regressions("small", worse, BEFORE) == []


def test_only_the_total_is_compared_if_other_kernels_were_chosen() -> None:
    other = Count({"winograd": 1_300_000, "depthwise": 200_000}, BEFORE.onnxruntime)
    (regression,) = regressions("small", other, BEFORE)
    assert regression == "small: 0.750 of ONNX Runtime's steps, 0.550 when it was recorded"


def test_a_kind_with_a_small_share_may_change() -> None:
    assert regressions("small", Count({**BEFORE.kinds, "other": 5_000}, BEFORE.onnxruntime), BEFORE) == []


def test_a_faster_onnx_runtime_is_noticed() -> None:
    (regression,) = regressions("small", Count(BEFORE.kinds, 1_000_000), BEFORE)
    assert regression.startswith("small: 1.101 of ONNX Runtime's")


def found_on(core: str, emulator: Emulator | None, folder: Path) -> list[str]:
    """Count all networks on a core; return what got worse."""
    places = [prepare(model, core, folder / model) for model in MODELS]
    counts = count(places, core, emulator, others=emulator is None)
    return [
        line
        for model, now in zip(MODELS, counts, strict=True)
        for line in regressions(model, now, recorded()[model, core])
    ]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="runs this Python on an emulated x86-64 core")
@pytest.mark.skipif(bool(MISSING) and "CI" not in os.environ, reason=MISSING)
def test_kernels_for_avx2_are_as_good_as_recorded(tmp_path: Path) -> None:
    assert found_on(X86, None, tmp_path) == []


@pytest.mark.arm
def test_kernels_for_a_cortex_a72_are_as_good_as_recorded(tmp_path: Path) -> None:
    assert found_on(ARM, Emulator.prepare(AGENT_PACKAGES), tmp_path) == []
