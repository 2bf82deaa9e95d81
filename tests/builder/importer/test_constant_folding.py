"""Constants are computed at import, exactly and within limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer import import_onnx
from builder.importer.constant_folding import fold_constants
from builder.importer.onnx_graph import OnnxGraph

ModelMaker = Callable[..., onnx.ModelProto]


def weights(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def test_a_shape_computed_from_a_shape_is_folded(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "one"], ["rows"]),
        helper.make_node("Mul", ["rows", "rows"], ["square"]),
        helper.make_node("Concat", ["minus", "square"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
        helper.make_node("Shape", ["y"], ["t"]),
        helper.make_node("Reshape", ["y", "t"], ["z"]),
    ]
    constants = {"one": np.array([1]), "minus": np.array([-1])}
    model = make_model(nodes, {"x": [8, 2, 3]}, {"z": [None, None]}, constants)
    fold_constants(model)
    assert operators(model) == ["Reshape", "Reshape"]
    assert weights(model)["target"].tolist() == [-1, 4]
    assert OnnxGraph(model).shape_of("z") == (12, 4)


def test_a_small_constant_is_not_expanded_into_a_large_one(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("Expand", ["w", "shape"], ["big"]),
        helper.make_node("Add", ["x", "big"], ["y"]),
    ]
    constants = {"w": np.ones(1, np.float32), "shape": np.array([1024, 1024])}
    model = make_model(nodes, {"x": [1024, 1024]}, {"y": [1024, 1024]}, constants)
    fold_constants(model)
    assert operators(model) == ["Expand", "Add"]


def test_random_numbers_are_not_constants(make_model: ModelMaker) -> None:
    node = helper.make_node("RandomNormal", [], ["r"], shape=[3])
    model = make_model([node, helper.make_node("Add", ["x", "r"], ["y"])], {"x": [3]}, {"y": [3]})
    fold_constants(model)
    assert operators(model) == ["RandomNormal", "Add"]


def test_unused_nodes_are_dropped_with_their_weights(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["unread"]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    model = make_model(nodes, {"x": [2, 3]}, {"y": [2, 3]}, {"w": np.ones((3, 4), np.float32)})
    fold_constants(model)
    assert operators(model) == ["Relu"]
    assert weights(model) == {}


def test_unused_optional_outputs_are_dropped(make_model: ModelMaker) -> None:
    node = helper.make_node("MaxPool", ["x"], ["y", "indices"], kernel_shape=[2, 2])
    model = make_model([node], {"x": [1, 1, 4, 4]}, {"y": [1, 1, 3, 3]})
    fold_constants(model)
    assert list(model.graph.node[0].output) == ["y"]


def test_values_that_a_branch_reads_are_kept(make_model: ModelMaker) -> None:
    def branch(name: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, [3])
        return helper.make_graph([helper.make_node("Add", ["x", name], [f"{name}_out"])], name, [], [out])

    node = helper.make_node("If", ["c"], ["y"], then_branch=branch("a"), else_branch=branch("b"))
    constants = {"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}
    model = make_model([node], {"x": [3], "c": ([], TensorProto.BOOL)}, {"y": [3]}, constants)
    fold_constants(model)
    assert set(weights(model)) == {"a", "b"}


def test_contradicting_shapes_are_refused_only_in_strict_mode(make_model: ModelMaker) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    model = make_model([node], {"x": [2, 3]}, {"y": [2, 4]}, {"w": np.ones((5, 4), np.float32)})
    fold_constants(model, strict=False)
    with pytest.raises(ModelError):
        fold_constants(model)


def test_constants_are_quantised_but_not_dequantised(make_model: ModelMaker) -> None:
    # As ONNX Runtime's quantiser writes weights with AddQDQPairToWeight.
    weights = {"w": np.arange(12, dtype="f4").reshape(4, 3), "s": np.float32(0.1), "z": np.int8(1)}
    nodes = [
        helper.make_node("QuantizeLinear", ["w", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    model = make_model(nodes, {"x": [2, 4]}, {"y": [2, 3]}, weights)
    fold_constants(model)
    assert [node.op_type for node in model.graph.node] == ["DequantizeLinear", "MatMul"]
    (codes,) = [numpy_helper.to_array(t) for t in model.graph.initializer if t.name == "q"]
    assert codes.dtype == np.int8
    assert codes.ravel().tolist() == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 101, 111]


def test_a_quantised_number_is_folded_and_weights_and_biases_are_not(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("DequantizeLinear", ["low", "scale"], ["limit"]),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["weights"]),
        helper.make_node("DequantizeLinear", ["b", "scale"], ["bias"]),
        helper.make_node("Clip", ["x", "limit"], ["limited"]),
        helper.make_node("Gemm", ["limited", "weights", "bias"], ["y"]),
    ]
    constants = {
        "low": np.array(-3, np.int8),
        "scale": np.float32(0.5),
        "w": np.ones((3, 1), np.int8),
        "b": np.ones(1, np.int32),
    }
    model = make_model(nodes, {"x": [2, 3]}, {"y": [2, 1]}, constants, opset=17)
    fold_constants(model)
    assert operators(model) == ["DequantizeLinear", "DequantizeLinear", "Clip", "Gemm"]
    assert weights(model)["limit"].tolist() == -1.5


@pytest.mark.parametrize("operator", ["ReduceMean", "ReduceMax", "ReduceLogSumExp"])
def test_what_is_computed_of_nothing(make_model: Any, run_onnx: Any, run_relax: Any, operator: str) -> None:
    nodes = [
        helper.make_node("Compress", ["x", "none"], ["nothing"], axis=0),
        helper.make_node(operator, ["nothing"], ["of_nothing"], keepdims=0),
        helper.make_node("Reshape", ["of_nothing", "line"], ["flat"]),
        helper.make_node("Concat", ["x", "flat"], ["y"], axis=0),
    ]
    weights = {"none": np.zeros(4, bool), "line": np.array([-1])}
    model = make_model(nodes, {"x": [4]}, {"y": ["n"]}, weights)
    x = np.arange(4, dtype=np.float32)
    (found,) = run_relax(import_onnx(model).mod, [x])
    np.testing.assert_array_equal(found, run_onnx(model, {"x": x})[0])


@pytest.mark.parametrize(
    ("operator", "given"),
    [
        ("TopK", {"of": np.array([0])}),
        ("Slice", {"of": np.array([3]), "to": np.array([3])}),
        ("Expand", {"of": np.array([0, 3, 1])}),
        ("Tile", {"of": np.array([2, 0])}),
        ("Gather", {"of": np.zeros(0, np.int64)}),
    ],
)
def test_what_makes_nothing(
    make_model: Any, run_onnx: Any, run_relax: Any, operator: str, given: Any
) -> None:
    outputs = ["y", "places"] if operator == "TopK" else ["y"]
    nodes = [
        helper.make_node(operator, ["x", *given], outputs),
        helper.make_node("Relu", ["x"], ["z"]),
    ]
    x = np.ones((3, 1), np.float32)
    model = make_model(nodes, {"x": [3, 1]}, {"y": None, "z": [3, 1]}, given)
    (wanted, _), (found, _) = run_onnx(model, {"x": x}), run_relax(import_onnx(model).mod, [x])
    assert found.shape == wanted.shape
    assert found.size == 0
