"""DFT and STFT."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one

CASES: dict[str, Case] = {
    "transform": (one("DFT", ["z"], axis=1), {}, [2, 3, 2]),
    "short transform": (one("DFT", ["z", "n"], axis=1, onesided=0), {"n": np.array(2)}, [2, 2, 2]),
    "long transform": (one("DFT", ["z", "n"], axis=1), {"n": np.array(6)}, [2, 6, 2]),
    "inverse transform": (one("DFT", ["z"], axis=1, inverse=1), {}, [2, 3, 2]),
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
