"""Scalers, encoders and other operators of ai.onnx.ml on features, as ONNX Runtime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.classic.conftest import (
    equal_to_ort,  # noqa: F401 - a fixture
    model_of,
)

X = np.array([[1, -2, 0], [0, 0, 0], [3, 5.5, -1], [7, 2, 2]], "f4")
FLOAT = TensorProto.FLOAT


def ml(op: str, output: str, *inputs: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(
        op, list(inputs or ["x"]), [output], name=output, domain="ai.onnx.ml", **attributes
    )


def with_rank(model: onnx.ModelProto, output: str, rank: int, kind: int = FLOAT) -> None:
    info = helper.make_tensor_value_info(output, kind, [None] * rank)
    next(one for one in model.graph.output if one.name == output).CopyFrom(info)


def test_operators_on_floats(equal_to_ort: Any) -> None:  # noqa: F811
    nodes = [
        ml("Scaler", "scaled", offset=[1.0, 2.0, 0.5], scale=[0.5, -1.0, 3.0]),
        ml("Scaler", "scaled_alike", offset=[1.0], scale=[0.5]),
        *(ml("Normalizer", f"norm{norm}", norm=norm) for norm in ("MAX", "L1", "L2")),
        ml("Imputer", "imputed", imputed_value_floats=[9.0, 8.0, 7.0], replaced_value_float=0.0),
        ml("Imputer", "imputed_nan", "n", imputed_value_floats=[9.0], replaced_value_float=float("nan")),
        ml("Binarizer", "binary", threshold=1.5),
        ml("ArrayFeatureExtractor", "chosen", "x", "places"),
        ml("FeatureVectorizer", "joined", "x", "imputed", inputdimensions=[2, 3]),
        ml("OneHotEncoder", "hot", cats_int64s=[0, 1, 7]),
        ml(
            "LabelEncoder",
            "coded",
            keys_floats=[0.0, 5.5, 2.0],
            values_floats=[4.0, 5.0, 6.0],
            default_float=-1.5,
        ),
        ml("LabelEncoder", "numbered", keys_floats=[0.0, 7.0], values_int64s=[40, 50]),
        helper.make_node("Where", ["is_zero", "nan", "x"], ["n"]),
        helper.make_node("Equal", ["x", "zero"], ["is_zero"]),
    ]
    names = [name for node in nodes[:-2] for name in node.output]
    model = model_of(nodes, X, dict.fromkeys(names, FLOAT), ml=2)
    with_rank(model, "hot", 3)
    with_rank(model, "numbered", 2, TensorProto.INT64)
    for name, value in {
        "nan": np.float32("nan"),
        "zero": np.float32(0),
        "places": np.array([[2, 0]]),
    }.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    imported = equal_to_ort(model, X)
    assert not any(node.domain for node in imported.onnx.graph.node)


def test_operators_on_integers_and_doubles(equal_to_ort: Any) -> None:  # noqa: F811
    x = np.array([[3], [-1], [5], [4], [9]], np.int64)
    nodes = [
        ml("LabelEncoder", "run", keys_int64s=[3, 4, 5], values_int64s=[30, 40, 50], default_int64=-7),
        ml("LabelEncoder", "other", keys_int64s=[9, 3], values_floats=[0.5, 1.5], default_float=2.5),
        ml("OneHotEncoder", "hot", cats_int64s=[3, 9]),
        ml("Scaler", "scaled", offset=[1.0], scale=[0.25]),
    ]
    outputs = {"run": TensorProto.INT64, "other": FLOAT, "hot": FLOAT, "scaled": FLOAT}
    model = model_of(nodes, x, outputs, ml=2)
    with_rank(model, "run", 2, TensorProto.INT64)
    with_rank(model, "hot", 3)
    equal_to_ort(model, x)
    doubles = np.array([[0.1, 3], [1e10, -2]])
    model = model_of([ml("Scaler", "s", offset=[1.0, 2.0], scale=[3.0, 4.0])], doubles, {"s": FLOAT})
    equal_to_ort(model, doubles)


def test_products_of_features_are_computed_together(equal_to_ort: Any) -> None:  # noqa: F811
    nodes, parts = [], []
    for place in range(5):
        nodes.append(helper.make_node("Gather", ["x", f"i{place}"], [f"g{place}"], axis=1))
        nodes.append(helper.make_node("ReduceProd", [f"g{place}"], [f"p{place}"], axes=[1]))
        parts.append(f"p{place}")
    nodes.append(helper.make_node("Concat", ["one", *parts], ["y"], axis=1))
    model = model_of(nodes, X, {"y": FLOAT})
    for place, factors in enumerate(([0], [1, 2], [0, 0], [2, 2, 1], [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(factors), f"i{place}"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 1), "f4"), "one"))
    imported = equal_to_ort(model, X)
    operators = [node.op_type for node in imported.onnx.graph.node]
    assert "ReduceProd" not in operators
    assert operators.count("Gather") == 3


def test_a_map_as_input_is_refused() -> None:
    model = model_of([ml("DictVectorizer", "y", int64_vocabulary=[1, 2])], X, {"y": FLOAT})
    value = helper.make_tensor_type_proto(FLOAT, [])
    model.graph.input[0].type.CopyFrom(helper.make_map_type_proto(TensorProto.INT64, value))
    with pytest.raises(ModelError, match="expected tensors as inputs, got 'x', a map"):
        import_onnx(model)
