"""Operators that only move elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one

CASES: dict[str, Case] = {
    "split with an empty part": (
        one("Split", ["x", "s"], ["y", "empty"], axis=2), {"s": np.array([4, 0])}, [2, 3, 4],
    ),
    "reversed sequences": (
        one("ReverseSequence", ["x", "n"], batch_axis=0, time_axis=1), {"n": np.array([2, 3])}, [2, 3, 4],
    ),
    "reversed sequences, time first": (
        one("ReverseSequence", ["x", "n"]), {"n": np.array([2, 1, 2])}, [2, 3, 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])
