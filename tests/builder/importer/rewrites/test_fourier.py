"""DFT and STFT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.importer.rewrites import fourier
from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one

CASES: dict[str, Case] = {
    "transform": (one("DFT", ["z"], axis=1), {}, [2, 3, 2]),
    "short transform": (one("DFT", ["z", "n"], axis=1, onesided=0), {"n": np.array(2)}, [2, 2, 2]),
    "long transform": (one("DFT", ["z", "n"], axis=1), {"n": np.array(6)}, [2, 6, 2]),
    "inverse transform": (one("DFT", ["z"], axis=1, inverse=1), {}, [2, 3, 2]),
    "real inverse": (one("DFT", ["z"], axis=1, inverse=1, onesided=1), {}, [2, 4, 1]),
    "real inverse of five": (
        one("DFT", ["z", "n"], axis=1, inverse=1, onesided=1), {"n": np.array(5)}, [2, 5, 1],
    ),
    "onesided transform": (one("DFT", ["r"], axis=1, onesided=1), {}, [2, 3, 2]),
    "short-time transform": (
        one("STFT", ["r", "step", "window"]),
        {"step": np.array(2), "window": np.hanning(4).astype(np.float32)}, [2, 1, 3, 2],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        *("long transform", "inverse transform of six", "real inverse"),
        *("onesided transform of six", "short-time transform"),
    ],
)
def test_long_transforms_are_split_in_two(
    make_model: ModelMaker, noise: Any, agrees: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(fourier, "MAX_LENGTH", 3)
    six = {"n": np.array(6)}
    cases = CASES | {
        "inverse transform of six": (one("DFT", ["z", "n"], axis=1, inverse=1), six, [2, 6, 2]),
        "onesided transform of six": (one("DFT", ["r", "n"], axis=1, onesided=1), six, [2, 4, 2]),
    }
    check_case(make_model, noise, agrees, *cases[case])


@pytest.mark.parametrize("length", [2053, 4099 * 2, 2048**2 + 1, 0])
def test_lengths_that_have_no_two_factors(length: int) -> None:
    assert fourier._factors(length) is None


def test_factors_are_near_each_other() -> None:
    assert [fourier._factors(length) for length in (7, 2048, 4096, 6000)] == [
        *((1, 7), (1, 2048), (64, 64)),
        (75, 80),
    ]
