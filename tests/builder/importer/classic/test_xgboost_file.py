"""Models that XGBoost saved give XGBoost's labels and probabilities; damaged files get one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn import datasets

from builder.errors import ModelError
from builder.importer import load
from builder.importer.classic.xgboost_file import read_xgboost

X, Y = datasets.load_diabetes(return_X_y=True)
CANCER = datasets.load_breast_cancer(return_X_y=True)
IRIS = datasets.load_iris(return_X_y=True)


def categories() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    x = np.column_stack([draw.integers(0, 40, 300), draw.integers(0, 5, 300), draw.standard_normal((300, 2))])
    x[::9, 0] = x[::7, 2] = np.nan
    y = np.isin(x[:, 0], [1, 3, 5, 7, 22, 31, 33]) + np.nan_to_num(x[:, 2]) + (x[:, 1] == 2) > 0.8
    return x, y * 1


CATEGORIES = categories()
KINDS = ["c", "c", "q", "q"]
# Objective or name -> parameters, data, and arguments of the data matrix.
MODELS: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    name: ({"objective": name}, (X, Y), {})
    for name in (
        "reg:squarederror", "reg:absoluteerror", "count:poisson", "reg:gamma", "reg:tweedie",
        "reg:pseudohubererror", "rank:pairwise", "reg:squaredlogerror", "survival:cox",
    )
} | {
    name: ({"objective": name}, CANCER, {})
    for name in ("binary:logistic", "binary:logitraw", "binary:hinge", "reg:logistic")
} | {
    "softprob": ({"objective": "multi:softprob", "num_class": 3}, IRIS, {}),
    "softmax": ({"objective": "multi:softmax", "num_class": 3}, IRIS, {}),
    "base score": ({"objective": "binary:logistic", "base_score": 0.3}, CANCER, {}),
    "linear": ({"objective": "reg:squarederror", "booster": "gblinear"}, (X, Y), {}),
    "linear, base": (
        {"objective": "binary:logistic", "booster": "gblinear", "base_score": 0.3}, CATEGORIES, {},
    ),
    "linear, classes": ({"objective": "multi:softprob", "num_class": 3, "booster": "gblinear"}, IRIS, {}),
    "dart": ({"objective": "binary:logistic", "booster": "dart", "rate_drop": 0.5}, CANCER, {}),
    "trees a round": ({"objective": "binary:logistic", "num_parallel_tree": 3, "subsample": 0.5}, CANCER, {}),
    "sets": ({"objective": "binary:logistic", "max_cat_to_onehot": 1}, CATEGORIES, {"feature_types": KINDS}),
    "one category a split": (
        {"objective": "binary:logistic", "max_cat_to_onehot": 99}, CATEGORIES, {"feature_types": KINDS},
    ),
    "two targets": ({"objective": "reg:squarederror"}, (X, np.column_stack([Y, np.sqrt(Y)])), {}),
}  # fmt: skip


def train(name: str, path: Path, rounds: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Train and save a model; return samples and XGBoost's answer."""
    parameters, (x, y), more = MODELS[name]
    matrix = xgboost.DMatrix(x, y, enable_categorical=True, **more)
    depth = {} if parameters.get("booster") == "gblinear" else {"max_depth": 4}
    booster = xgboost.train({"nthread": 1, **depth, **parameters}, matrix, rounds)
    booster.save_model(path)
    samples = x[:40].astype("f4")
    return samples, booster.predict(xgboost.DMatrix(samples, enable_categorical=True, **more))


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_answers_as_xgboost_does(tmp_path: Path, run_onnx: Any, name: str) -> None:
    path = tmp_path / ("model.json" if len(name) % 2 else "model.ubj")
    samples, expected = train(name, path)
    imported = load(path, input_shapes={"features": samples.shape})
    found = run_onnx(imported.onnx, {"features": samples})
    if len(found) == 1:
        np.testing.assert_allclose(found[0].reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)
    elif name == "softmax":
        np.testing.assert_array_equal(found[0], expected)
    else:
        labels = expected.argmax(1) if expected.ndim == 2 else expected > 0.5
        np.testing.assert_array_equal(found[0], labels)
        chances = found[1] if expected.ndim == 2 else found[1][:, 1]
        np.testing.assert_allclose(chances, expected, atol=1e-6)


def test_both_forms_and_a_best_iteration(tmp_path: Path, run_onnx: Any) -> None:
    x, y = CANCER
    classifier = xgboost.XGBClassifier(n_estimators=30, early_stopping_rounds=2, n_jobs=1, learning_rate=1.0)
    classifier.fit(x[::2], y[::2], eval_set=[(x[1::2], y[1::2])], verbose=False)
    assert classifier.best_iteration < 28
    notes: list[str] = []
    for suffix in ("json", "ubj"):
        path = tmp_path / f"model.{suffix}"
        classifier.save_model(path)
        imported = load(path, input_shapes={"features": (50, 30)}, progress=notes.append)
        samples = x[:50].astype("f4")
        found = run_onnx(imported.onnx, {"features": samples})
        np.testing.assert_allclose(found[1], classifier.predict_proba(samples), atol=1e-6)
    assert any("best iteration" in note for note in notes)


@pytest.mark.parametrize("name", ["reg:squarederror", "rank:pairwise", "softprob"])
def test_a_model_of_no_rounds_answers_with_its_base_score(tmp_path: Path, run_onnx: Any, name: str) -> None:
    for suffix in ("json", "ubj"):
        samples, expected = train(name, tmp_path / f"model.{suffix}", rounds=0)
        imported = load(tmp_path / f"model.{suffix}", input_shapes={"features": samples.shape})
        found = run_onnx(imported.onnx, {"features": samples})[-1]
        chances = found[:, 1] if expected.ndim == 1 and found.shape[1] == 2 else found
        np.testing.assert_allclose(chances.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_a_model_of_no_rounds_whose_base_score_has_a_link_is_refused(tmp_path: Path) -> None:
    """XGBoost 3.2 answers with sigmoid(0.5) there, and with 0.5 if there are trees of zeros."""
    train("binary:logistic", tmp_path / "model.json", rounds=0)
    with pytest.raises(ModelError, match="expected trees of binary:logistic, got none"):
        load(tmp_path / "model.json")


def test_what_cannot_be_imported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    train("softprob", path)
    document = json.loads(path.read_text())
    changes: list[tuple[list[Any], Any, str]] = [
        (["learner", "objective", "name"], "reg:secret", "got 'reg:secret'"),
        (["learner", "gradient_booster", "name"], "gbforest", "expected a booster of trees"),
        (
            ["learner", "gradient_booster"],
            {"name": "gblinear", "model": {"weights": [1]}},
            "15 finite weights",
        ),
        (["learner", "gradient_booster", "model", "trees", 0, "left_children", 0], 99, "nodes of the tree"),
        (["learner", "gradient_booster", "model", "trees", 0, "split_indices", 0], 4, "features from 0 to 3"),
        (["learner", "gradient_booster", "model", "trees", 0, "default_left"], [1], "in default_left, got 1"),
        (["learner", "gradient_booster", "model", "tree_info", 0], 7, "target below 3, got 7"),
        (["learner", "gradient_booster", "model", "trees"], [], "expected 24 trees, as the file says, got 0"),
        (["learner", "learner_model_param", "base_score"], "many", "base|many"),
        (["learner", "learner_model_param"], {}, "without 'num_class'"),
    ]
    for keys, value, message in changes:
        changed = json.loads(json.dumps(document))
        at = changed
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value
        path.write_text(json.dumps(changed))
        with pytest.raises(ModelError, match=message):
            load(path)


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_damaged_files_get_one_line(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    train("sets", path, rounds=2)
    raw = path.read_bytes()
    draw = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(raw)
        match draw.randrange(3):
            case 0:
                for _ in range(draw.randrange(1, 4)):
                    damaged[draw.randrange(len(damaged))] = draw.randrange(256)
            case 1:
                del damaged[draw.randrange(len(damaged)) :]
            case 2:
                at = draw.randrange(len(damaged))
                damaged[at : at + draw.randrange(1, 9)] = draw.randbytes(draw.randrange(9))
        path.write_bytes(damaged)
        try:
            read_xgboost(path, lambda _: None)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
            assert len(str(error)) < 400
    assert refused > 150


def test_a_file_of_brackets_is_refused(tmp_path: Path) -> None:
    for name, content in {
        "deep.json": b"[" * 100_000,
        "deep.ubj": b"[" * 100_000,
        "long.ubj": b"[$L#L" + (1 << 60).to_bytes(8, "big"),
        "many.ubj": b"[#L" + (1 << 60).to_bytes(8, "big"),
        "empty.json": b"",
        "list.json": b"[]",
        "other.ubj": b"\x00\x01",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError):
            load(tmp_path / name)
