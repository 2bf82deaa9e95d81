"""Trained classic models to damage: trees of XGBoost and LightGBM, estimators as skl2onnx writes them."""

from __future__ import annotations

import contextlib
import io
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import xgboost
from skl2onnx import to_onnx
from sklearn import datasets
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import SVC

from builder.importer.classic import ubjson


def _data() -> tuple[Any, Any]:
    return datasets.load_iris(return_X_y=True)


def _categories() -> tuple[Any, Any]:
    draw = np.random.default_rng(0)
    x = np.column_stack([draw.integers(0, 40, 300), draw.integers(0, 5, 300), draw.standard_normal((300, 2))])
    return x, np.isin(x[:, 0], [1, 3, 5, 22, 31]) * 1


def xgboost_models(suffix: str) -> list[bytes]:
    """Models of several kinds, as XGBoost saves them under a suffix."""
    found = []
    x, y = _data()
    cx, cy = _categories()
    kinds: list[tuple[dict[str, Any], Any, Any, Any]] = [
        ({"objective": "multi:softprob", "num_class": 3}, x, y, None),
        ({"objective": "binary:logistic", "booster": "dart", "rate_drop": 0.5}, x, y > 0, None),
        ({"objective": "reg:squarederror"}, x, y, None),
        ({"objective": "binary:logistic", "max_cat_to_onehot": 1}, cx, cy, ["c", "c", "q", "q"]),
    ]
    for parameters, inputs, wanted, types in kinds:
        matrix = xgboost.DMatrix(inputs, wanted, feature_types=types, enable_categorical=True)
        booster = xgboost.train({"nthread": 1, "max_depth": 3, **parameters}, matrix, 3)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"model{suffix}"
            booster.save_model(path)
            found.append(path.read_bytes())
    return found


def lightgbm_models() -> list[bytes]:
    """Models of several kinds, as LightGBM saves them."""
    x, y = _data()
    cx, cy = _categories()
    kinds: list[tuple[dict[str, Any], Any, Any, Any]] = [
        ({"objective": "multiclass", "num_class": 3}, x, y, "auto"),
        ({"objective": "binary"}, cx, cy, [0, 1]),
        ({"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}, x, y, "auto"),
    ]  # fmt: skip
    found = []
    for parameters, inputs, wanted, categorical in kinds:
        shared = {"num_threads": 1, "verbose": -1, "num_leaves": 5, "min_data_in_leaf": 3}
        data = lightgbm.Dataset(inputs, wanted, categorical_feature=categorical, params={"verbose": -1})
        booster = lightgbm.train({**shared, **parameters}, data, 3)
        found.append(booster.model_to_string().encode())
    return found


def sklearn_models() -> list[bytes]:
    """Estimators and pipelines, as ONNX models with operators of ai.onnx.ml."""
    x, y = _data()
    x = x.astype(np.float32)
    names = np.array(["a", "b", "c"])[y]
    estimators = [
        RandomForestClassifier(3, max_depth=3, random_state=0).fit(x, names),
        RandomForestRegressor(3, max_depth=3, random_state=0).fit(x, np.column_stack([y, y + 1.5])),
        GradientBoostingClassifier(n_estimators=2, max_depth=2, random_state=0).fit(x, y),
        make_pipeline(StandardScaler(), SVC(probability=True, random_state=0)).fit(x[::4], y[::4]),
        make_pipeline(MinMaxScaler(), LogisticRegression(max_iter=200)).fit(x, names),
        KNeighborsClassifier(3).fit(x[::8], y[::8]),
    ]
    found = [to_onnx(estimator, x[:1]).SerializeToString() for estimator in estimators]
    whole = np.floor(x[:, :2]).astype(np.int64)
    encoder = OneHotEncoder(handle_unknown="ignore").fit(whole)
    return [*found, to_onnx(encoder, whole[:1]).SerializeToString()]


def to_ubjson(value: Any) -> bytes:
    """Write a document as Universal Binary JSON, with arrays of numbers as XGBoost writes them."""
    with contextlib.suppress(RecursionError):
        return b"".join(_pieces(value))
    return b"{" + b"L" + struct.pack(">q", 1) + b"a" + b"[" * 100_000


def from_ubjson(raw: bytes) -> Any:
    """Read a document."""
    return ubjson.loads(raw)


def _pieces(value: Any) -> Iterator[bytes]:
    if value is None or isinstance(value, bool):
        yield {None: b"Z", True: b"T", False: b"F"}[value]
    elif isinstance(value, int):
        yield b"L" + struct.pack(">q", max(-(2**63), min(2**63 - 1, value)))
    elif isinstance(value, float):
        yield b"D" + struct.pack(">d", value)
    elif isinstance(value, str):
        yield b"S" + _text(value)
    elif isinstance(value, np.ndarray):
        marker = {"i1": b"i", "u1": b"U", "i2": b"I", "i4": b"l", "i8": b"L", "f4": b"d", "f8": b"D"}
        yield b"[$" + marker[value.dtype.str[1:]] + b"#L" + struct.pack(">q", value.size)
        yield value.astype(value.dtype.newbyteorder(">")).tobytes()
    elif isinstance(value, list):
        yield b"["
        for item in value:
            yield from _pieces(item)
        yield b"]"
    else:
        yield b"{"
        for key, item in value.items():
            yield _text(key)
            yield from _pieces(item)
        yield b"}"


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"L" + struct.pack(">q", len(raw)) + raw


def legacy_xgboost() -> bytes:
    """The beginning of the binary form that XGBoost wrote until 2.0."""
    stream = io.BytesIO(b"binf")
    stream.seek(0, io.SEEK_END)
    stream.write(struct.pack("<fIiiI", 0.5, 4, 0, 1, 0) + bytes(108))
    stream.write(struct.pack("<Q", 16) + b"binary:logistic\0" + struct.pack("<Q", 6) + b"gbtree" + bytes(200))
    return stream.getvalue()
