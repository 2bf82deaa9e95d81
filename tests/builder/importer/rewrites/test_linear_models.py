"""Linear models and distances, as ONNX Runtime computes them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.importer.rewrites import linear_models
from tests.builder.importer.classic.conftest import (
    equal_to_ort,  # noqa: F401 - a fixture
    model_of,
)

RANDOM = np.random.default_rng(8)
X = RANDOM.standard_normal((5, 3)).astype("f4")


def drawn(count: int) -> list[float]:
    return [float(value) for value in RANDOM.standard_normal(count).astype("f4")]


def test_classifiers_and_regressors(equal_to_ort: Any) -> None:  # noqa: F811
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}
    for rows, after in itertools.product((1, 2, 3), ("NONE", "LOGISTIC", "SOFTMAX")):
        name = f"{rows}{after}"
        nodes.append(
            helper.make_node(
                "LinearClassifier",
                ["x"],
                [f"y{name}", f"z{name}"],
                name=name,
                domain="ai.onnx.ml",
                coefficients=drawn(rows * 3),
                intercepts=drawn(rows),
                classlabels_ints=[5, 3, 9][: max(2, rows)],
                post_transform=after,
            )
        )
        nodes.append(
            helper.make_node(
                "LinearRegressor",
                ["x"],
                [f"r{name}"],
                name=f"r{name}",
                domain="ai.onnx.ml",
                coefficients=drawn(rows * 3),
                intercepts=drawn(rows),
                targets=rows,
            )
        )
        outputs |= {
            f"y{name}": TensorProto.INT64,
            f"z{name}": TensorProto.FLOAT,
            f"r{name}": TensorProto.FLOAT,
        }
    imported = equal_to_ort(model_of(nodes, X, outputs), X)
    assert not any(node.domain for node in imported.onnx.graph.node)


@pytest.mark.parametrize("limit", [linear_models.MAX_DIFFERENCES, 0], ids=["differences", "product"])
@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_distances(
    equal_to_ort: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    limit: int,
) -> None:
    monkeypatch.setattr(linear_models, "MAX_DIFFERENCES", limit)
    node = helper.make_node("CDist", ["x", "others"], ["y"], domain="com.microsoft", metric=metric)
    model = model_of([node], X, {"y": TensorProto.FLOAT})
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    others = RANDOM.standard_normal((7, 3)).astype("f4")
    model.graph.initializer.append(numpy_helper.from_array(others, "others"))
    equal_to_ort(model, X, rtol=1e-4, atol=1e-5)
