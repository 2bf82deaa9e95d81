"""Models that LightGBM saved give LightGBM's labels and probabilities; damaged files get one line."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.errors import ModelError
from builder.importer import load
from builder.importer.classic.lightgbm_file import read_lightgbm
from tests.builder.importer.classic.test_xgboost_file import CANCER, CATEGORIES, IRIS, X, Y
from tests.needs import needed_lightgbm

lightgbm: Any = needed_lightgbm()

SMALL = {"min_data_per_group": 5, "cat_smooth": 1, "min_data_in_leaf": 3}
MODELS: dict[str, tuple[dict[str, Any], Any]] = {
    name: ({"objective": name}, (X, Y))
    for name in (
        "regression", "regression_l1", "huber", "fair", "poisson", "quantile", "mape", "gamma", "tweedie",
    )
} | {
    "cross_entropy_lambda": ({"objective": "cross_entropy_lambda"}, (X, Y / 400)),
    "square roots": ({"objective": "regression", "reg_sqrt": True}, (X, Y - 150)),
    "cross_entropy": ({"objective": "cross_entropy"}, (X, Y / 400)),
    "multiclass": ({"objective": "multiclass", "num_class": 3}, IRIS),
    "multiclassova": ({"objective": "multiclassova", "num_class": 3}, IRIS),
    "binary": ({"objective": "binary"}, CANCER),
    "binary, steep": ({"objective": "binary", "sigmoid": 2.0}, CANCER),
    "dart": ({"objective": "binary", "boosting": "dart"}, CANCER),
    "random forest": (
        {"objective": "binary", "boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1}, CANCER,
    ),
    "categories": ({"objective": "binary", **SMALL}, CATEGORIES),
    "missing": ({"objective": "binary"}, CATEGORIES),
    "missing as zero": ({"objective": "binary", "use_missing": False}, CATEGORIES),
}  # fmt: skip


def train(name: str, path: Path, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Train and save a model; return samples and LightGBM's answer."""
    parameters, (x, y) = MODELS[name]
    chosen = [0, 1] if name == "categories" else "auto"
    data = lightgbm.Dataset(x, y, categorical_feature=chosen)
    settings = {"verbose": -1, "num_threads": 1, "seed": 1, **parameters}
    booster = lightgbm.train(settings, data, rounds)
    booster.save_model(path)
    samples = x[:40].astype("f4")
    return samples, booster.predict(samples.astype("f8"))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_answers_as_lightgbm_does(tmp_path: Path, run_onnx: Any, name: str) -> None:
    samples, expected = train(name, tmp_path / "model.txt")
    imported = load(tmp_path / "model.txt", input_shapes={"features": samples.shape})
    found = run_onnx(imported.onnx, {"features": samples})
    if len(found) == 1:
        np.testing.assert_allclose(found[0].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
        return
    labels = expected.argmax(1) if expected.ndim == 2 else expected > 0.5
    np.testing.assert_array_equal(found[0], labels)
    chances = found[1] if expected.ndim == 2 else found[1][:, 1]
    np.testing.assert_allclose(chances, expected, atol=1e-6)


def test_thresholds_are_rounded_so_that_every_float32_takes_lightgbms_branch(
    tmp_path: Path, run_onnx: Any
) -> None:
    samples, _ = train("regression", tmp_path / "model.txt")
    booster = lightgbm.Booster(model_file=tmp_path / "model.txt")
    table: dict[int, list[np.float32]] = {}
    for row in _splits(booster):
        near = np.float32(row["threshold"])
        beside = [np.nextafter(near, np.float32(9)), np.nextafter(near, np.float32(-9))]
        table.setdefault(row["split_feature"], []).extend([near, *beside])
    x = np.repeat(samples[:1], 120, 0)
    for feature, values in table.items():
        x[:, feature] = np.resize(values, len(x))
    imported = load(tmp_path / "model.txt", input_shapes={"features": x.shape})
    found = run_onnx(imported.onnx, {"features": x})[0]
    np.testing.assert_allclose(found[:, 0], booster.predict(x.astype("f8")), rtol=1e-6)


def _splits(booster: Any) -> list[dict[str, Any]]:
    found, waiting = [], [tree["tree_structure"] for tree in booster.dump_model()["tree_info"]]
    while waiting:
        node = waiting.pop()
        if "threshold" in node:
            found.append(node)
            waiting += [node["left_child"], node["right_child"]]
    return found


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b"objective=multiclass num_class:3", b"objective=secret", "got 'secret'"),
        (b"is_linear=0", b"is_linear=1", "linear_tree"),
        (b"num_leaves=", b"num_leaves=7", "leaves, got"),
        (b"left_child=", b"left_child=-99 ", "in each list|nodes of the tree"),
        (b"split_feature=", b"split_feature=9 ", "in each list|features from 0"),
        (b"threshold=", b"threshold=nan ", "NaN"),
        (b"leaf_value=", b"leaf_value=x ", "expected numbers"),
        (b"leaf_value=", b"leaf_value=1e300 ", "float32 can hold, got 1e\\+300"),
        (b"decision_type=2", b"decision_type=4", "got a model in which they are missing"),
        (b"num_tree_per_iteration=3", b"num_tree_per_iteration=7", "multiple of 7"),
        (b"max_feature_idx=", b"max_feature_idx=99999999999", "expected 1 to \\d+ features, got 99999999999"),
        (b"max_feature_idx", b"max_idx", "without b'max_feature_idx'"),
        (b"tree\n", b"forest\n", "begins with 'tree'"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, before: bytes, after: bytes, message: str) -> None:
    path = tmp_path / "model.txt"
    train("multiclass", path, rounds=2)
    raw = path.read_bytes()
    assert before in raw
    path.write_bytes(raw.replace(before, after, 1))
    with pytest.raises(ModelError, match=message):
        load(path)


@pytest.mark.parametrize("end", [b"\nTree=3\n", b"\nTree=0\n", b"\ntree_sizes"])
def test_a_file_that_is_cut_between_two_trees_is_refused(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "model.txt"
    train("multiclass", path, rounds=2)
    path.write_bytes(path.read_bytes().partition(end)[0] + b"\n")
    with pytest.raises(ModelError, match=r"expected 6 trees, got [03]|a file that was cut off"):
        load(path)


def test_damaged_files_get_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.txt"
    train("categories", path, rounds=2)
    raw = path.read_bytes().partition(b"feature_importances")[0]
    draw = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(raw)
        at = draw.randrange(len(damaged))
        damaged[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(9))
        path.write_bytes(damaged)
        try:
            read_lightgbm(path)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 400
    assert refused > 60
