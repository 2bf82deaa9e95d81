"""How far an output may differ."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.conformance.verdict import difference

WANT = np.array([1.0, 2000.0, np.nan, np.inf], np.float32)


def test_rounding_is_no_difference() -> None:
    assert not difference(WANT * np.float32(1.0001), WANT)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (WANT + np.array([0.1, 0, 0, 0], np.float32), "1 of 4 elements differ: expected 1.0, got 1.1"),
        (np.where(np.isnan(WANT), 0, WANT).astype(np.float32), "expected nan, got 0.0 at [2]"),
        (-WANT, "expected inf, got -inf"),
        (WANT[:3], "expected shape [4], got [3]"),
        (WANT.astype(np.float64), "expected float32, got float64"),
    ],
    ids=["number", "nan", "sign", "shape", "dtype"],
)
def test_a_wrong_output_is_noticed(found: np.ndarray, said: str) -> None:
    reason = difference(found, WANT) if said != "expected inf, got -inf" else difference(found[3:], WANT[3:])
    assert said in reason


def test_integers_are_exact() -> None:
    want = np.array([1_000_000, 2])
    assert not difference(want.copy(), want)
    assert difference(want + np.array([1, 0]), want).startswith("1 of 2 elements differ")


def test_short_floats_may_differ_by_their_rounding() -> None:
    want = np.array([1.0], np.float16)
    assert not difference(np.array([1.005], np.float16), want)
    assert difference(np.array([1.05], np.float16), want)


def test_steps_of_quantised_numbers() -> None:
    found, want = np.array([1, -128], np.int8), np.array([2, 127], np.int8)
    assert "1 of 2 elements differ" in difference(found, want, atol=1.0)
    assert difference(found[:1], want[:1], atol=1.0) == ""
    assert "1 of 1 elements differ" in difference(found[:1], want[:1], atol=1e-4)
