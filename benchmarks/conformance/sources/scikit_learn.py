"""Every estimator of scikit-learn, trained on small tables and written as ONNX by skl2onnx.

scikit-learn's own predictions are right. Where float32 may decide a class otherwise than float64, in a tie or
beside a threshold, the rows are left out: the numbers of the tables are multiples of 1/16.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from skl2onnx import to_onnx
from sklearn.base import is_classifier
from sklearn.utils import all_estimators

from benchmarks.conformance.case import Array, Case
from benchmarks.conformance.sources.makers import Maker

_ROWS: Final = 60
_COLUMNS: Final = 5
_ASKED: Final = 10
# scikit-learn's double precision, and float32 in the model.
_RTOL: Final = 1e-3
_ATOL: Final = 1e-4
# What an estimator is trained for: labels that are numbers or strings, two classes or three.
TASKS: Final = ("two", "three", "strings", "number", "numbers", "positive")


def makers() -> Iterator[Maker]:
    """Return each estimator with each table that it can be trained on."""
    for name, kind in all_estimators():
        for task in TASKS:
            yield f"{name}_{task}", functools.partial(make, name, kind, task)


def make(name: str, kind: type[Any], task: str, folder: Path) -> Case:
    """Make a case of an estimator.

    Raises
    ------
    ValueError
        If it is not made for such a table.
    """
    rng = np.random.default_rng(7)
    x = (rng.integers(-32, 33, (_ROWS, _COLUMNS)) / 16).astype(np.float32)
    sums = x[:, 0] - 2 * x[:, 1] + x[:, 2] * x[:, 3]
    targets: dict[str, Any] = {
        "two": (sums > 0).astype(np.int64),
        "three": np.digitize(sums, [-1, 1]).astype(np.int64),
        "strings": np.array(["low", "middle", "high"])[np.digitize(sums, [-1, 1])],
        "number": sums.astype(np.float32),
        "numbers": np.stack([sums, x[:, 4] - x[:, 0]], axis=1).astype(np.float32),
        "positive": np.exp(sums / 4).astype(np.float32),
    }
    estimator = constructed(kind)
    if is_classifier(estimator) != (task in TASKS[:3]):
        raise ValueError("made for another table")
    if task == "positive":
        x = np.abs(x)
    estimator.fit(x, targets[task])
    asked = x[:_ASKED]
    options = {id(estimator): {"zipmap": False}} if is_classifier(estimator) else None
    model = to_onnx(estimator, asked[:1], options=options, target_opset={"": 17, "ai.onnx.ml": 3})
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    found = expected(estimator, asked, len(model.graph.output))
    # skl2onnx writes what a regressor predicts as a column.
    ranks = [len(value.type.tensor_type.shape.dim) for value in model.graph.output]
    outputs = [
        each.reshape(-1, 1) if rank == 2 and each.ndim == 1 else each
        for each, rank in zip(found, ranks, strict=True)
    ]
    [value] = model.graph.input
    return Case("scikit_learn", f"{name}_{task}", name, path, {value.name: asked}, outputs, _RTOL, _ATOL)


def constructed(kind: type[Any]) -> Any:  # noqa: ANN401
    """Return an estimator with small settings; one that holds others gets a linear model."""
    from sklearn.linear_model import LinearRegression, LogisticRegression

    wanted = inspect.signature(kind).parameters
    settings: dict[str, Any] = {"n_estimators": 5, "random_state": 0, "max_iter": 200, "n_components": 2}
    given = {key: value for key, value in settings.items() if key in wanted}
    for key in ("estimator", "base_estimator", "regressor"):
        if key in wanted and wanted[key].default is inspect.Parameter.empty:
            is_regressor = "Regress" in kind.__name__ or key == "regressor"
            given[key] = LinearRegression() if is_regressor else LogisticRegression()
    if "estimators" in wanted and wanted["estimators"].default is inspect.Parameter.empty:
        is_regressor = "Regress" in kind.__name__
        given["estimators"] = [("one", LinearRegression() if is_regressor else LogisticRegression())]
    return kind(**given)


def expected(estimator: Any, x: Array, count: int) -> list[Array]:  # noqa: ANN401
    """Return what scikit-learn predicts, as skl2onnx orders it."""
    if hasattr(estimator, "predict") and (count == 1 or not hasattr(estimator, "transform")):
        found = [_typed(estimator.predict(x))]
        if count == 2:
            for method in ("predict_proba", "decision_function", "transform", "score_samples"):
                if hasattr(estimator, method):
                    found.append(_typed(getattr(estimator, method)(x)))
                    break
    elif hasattr(estimator, "predict"):
        found = [_typed(estimator.predict(x)), _typed(estimator.transform(x))]
    else:
        found = [_typed(estimator.transform(x))]
    if len(found) != count:
        raise ValueError(f"expected {count} outputs, got {len(found)}")
    return found


def _typed(found: Any) -> Array:  # noqa: ANN401
    """Return a prediction in the type that skl2onnx gives it."""
    array = found.toarray() if hasattr(found, "toarray") else np.asarray(found)
    if array.dtype.kind == "f":
        return array.astype(np.float32)
    return array.astype(np.int64) if array.dtype.kind in "iu" else array.astype(str)
