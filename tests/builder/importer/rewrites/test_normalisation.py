"""Normalisations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.errors import ModelError
from builder.importer import import_onnx
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


def test_mean_and_variance_along_axes_that_do_not_exist(make_model: ModelMaker) -> None:
    """The default axes are those of images: a matrix has no third axis."""
    node = one("MeanVarianceNormalization", ["x"])
    with pytest.raises(ModelError, match=r"expected axes of 2 dimensions, got \[0, 2, 3\]") as raised:
        import_onnx(make_model([node], {"x": [3, 4]}, {"y": [3, 4]}, {}))
    assert raised.value.hint is not None
    assert "`axes`" in raised.value.hint


@pytest.mark.parametrize("scale", [[1, 4], [3, 4], [2, 1, 4], [2, 3, 4], [1, 1, 4]], ids=str)
@pytest.mark.parametrize("bias", [None, [4], [3, 1], [2, 3, 4]], ids=str)
def test_layer_normalisation_with_a_scale_of_more_dimensions(
    make_model: ModelMaker, noise: Any, agrees: Any, scale: list[int], bias: list[int] | None
) -> None:
    weights = {"s": noise(*scale)} | ({} if bias is None else {"b": noise(*bias)})
    node = one("LayerNormalization", ["x", *weights], axis=-1)
    agrees(make_model([node], {"x": [2, 3, 4]}, {"y": [2, 3, 4]}, weights), noise(2, 3, 4))


@pytest.mark.parametrize("scale", [[4], [1, 4], [3, 1]], ids=str)
def test_layer_normalisation_over_more_axes_than_its_scale_has(
    make_model: ModelMaker, noise: Any, agrees: Any, scale: list[int]
) -> None:
    weights = {"s": noise(*scale), "b": noise(3, 4)}
    node = one("LayerNormalization", ["x", "s", "b"], ["y", "", "deviation"], axis=1)
    outputs = {"y": [2, 3, 4], "deviation": [2, 1, 1]}
    agrees(make_model([node], {"x": [2, 3, 4]}, outputs, weights), noise(2, 3, 4))


@pytest.mark.parametrize("training", [0, 1])
def test_batch_normalisation_of_a_vector(
    make_model: ModelMaker, noise: Any, agrees: Any, training: int
) -> None:
    weights = {"s": noise(1), "b": noise(1), "m": noise(1), "v": abs(noise(1))}
    outputs = {"y": [5]} | ({"nm": [1], "nv": [1]} if training else {})
    node = one("BatchNormalization", ["x", *weights], list(outputs), training_mode=training)
    agrees(make_model([node], {"x": [5]}, outputs, weights), noise(5))


@pytest.mark.parametrize(
    ("shape", "groups", "opset"), [([2, 4, 3], 2, 18), ([1, 6, 2, 5], 3, 20), ([2, 4], 1, 18)], ids=str
)
def test_groups_with_a_gain_each(
    make_model: ModelMaker, noise: Any, agrees: Any, shape: list[int], groups: int, opset: int
) -> None:
    """ONNX's checker refuses GroupNormalization of opsets 18 to 20."""
    node = one("GroupNormalization", ["x", "s", "b"], num_groups=groups, epsilon=0.01)
    weights = {"s": noise(groups), "b": noise(groups)}
    model = make_model([node], {"x": shape}, {"y": shape}, weights, opset=opset)
    agrees(model, 3 + noise(*shape))
