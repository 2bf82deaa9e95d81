"""Normalisations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one

CASES: dict[str, Case] = {
    "lp normalisation": (one("LpNormalization", ["x"], axis=1), {}, [2, 3, 4]),
    "lp normalisation by sums": (one("LpNormalization", ["x"], axis=-1, p=1), {}, [2, 3, 4]),
    "mean and variance": (one("MeanVarianceNormalization", ["x"], axes=[0, 2]), {}, [2, 3, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])


@pytest.mark.slow
def test_batch_normalisation_in_training_mode_uses_the_batch(
    make_model: ModelMaker, noise: Any, agrees: Any
) -> None:
    weights = {name: np.abs(noise(3)) + 0.5 for name in ("s", "b", "m", "v")}
    node = one("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "nm", "nv"], training_mode=1)
    model = make_model([node], {"x": [2, 3, 4]}, {"y": [2, 3, 4], "nm": [3], "nv": [3]}, weights)
    agrees(model, noise(2, 3, 4))
