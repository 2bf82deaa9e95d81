"""Only a model that says what a missing value means gets NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.missing_values import takes_nan


def node(operator: str, *names: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, names[:-1], names[-1:], domain=domain, **attributes)


def tree(source: str, tracks: Sequence[int] | None) -> onnx.NodeProto:
    given = {} if tracks is None else {"nodes_missing_value_tracks_true": tracks}
    return node("TreeEnsemble", source, "y", domain="ai.onnx.ml", **given)


def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in "xy"]
    weights = [numpy_helper.from_array(np.zeros(2, np.float32), "w")]
    return helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], weights))


IMPUTER = (node("IsNaN", "x", "absent"), node("Where", "absent", "w", "x", "filled"))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ((tree("x", [1, 0]),), True),
        ((tree("x", [0, 0]),), False),
        ((tree("x", None),), False),
        ((node("Floor", "x", "f"), node("Where", "c", "f", "x", "s"), tree("s", [1])), True),
        ((node("Cast", "x", "d", to=TensorProto.DOUBLE), tree("d", [1])), True),
        ((node("Cast", "x", "d", to=TensorProto.INT64), tree("d", [1])), False),
        ((node("Concat", "w", "x", "d", axis=1), tree("d", [1])), True),
        ((*IMPUTER, node("MatMul", "filled", "w", "y")), True),
        ((*IMPUTER, node("MatMul", "x", "filled", "y")), False),
        ((node("IsNaN", "x", "absent"), node("Where", "absent", "x", "w", "y")), False),
        ((node("Identity", "x", "y"),), False),
        ((node("Relu", "x", "y"),), False),
        ((node("Greater", "x", "w", "y"),), False),
        ((node("Gather", "w", "x", "d"), tree("d", [1])), False),
        ((node("Scale", "x", "d", domain="ai.onnx.ml"), tree("d", [1])), False),
        ((node("Identity", "w", "y"),), False),
    ],
)
def test_where_nan_goes(nodes: Sequence[onnx.NodeProto], expected: bool) -> None:
    assert takes_nan(model(*nodes), "x") is expected
