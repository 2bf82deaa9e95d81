"""Damaged and hostile ONNX files: a sample; `python -m benchmarks.fuzz_onnx` has ten thousand."""

from __future__ import annotations

import pytest

from benchmarks.fuzz_onnx import HOSTILE, case, run

# The others are long chains and loops, which take seconds.
QUICK = [seed for seed in range(len(HOSTILE)) if seed not in (5, 9, 11)]


@pytest.mark.parametrize("seed", QUICK)
def test_a_hostile_model_is_refused_or_imported(seed: int) -> None:
    verdict = run(seed)
    assert verdict.kind in ("imported", "refused"), verdict


@pytest.mark.slow
def test_damaged_files_are_refused_in_one_line() -> None:
    verdicts = [run(seed) for seed in range(1000, 1060)]
    assert all(verdict.kind in ("imported", "refused") for verdict in verdicts), verdicts
    assert {verdict.kind for verdict in verdicts} == {"imported", "refused"}


def test_a_seed_makes_the_same_file_again() -> None:
    assert case(1234) == case(1234) != case(1235)
