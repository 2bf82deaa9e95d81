"""A normalised model is static, folded, and computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.importer.normalise import normalise
from builder.importer.structure import prepare

ModelMaker = Callable[..., onnx.ModelProto]


def normal(model: onnx.ModelProto) -> onnx.ModelProto:
    return normalise(prepare(model), {}, {}, lambda _: None)


def test_duplicate_weights_and_nodes_are_merged(make_model: ModelMaker, run_onnx: Any) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "v"], ["a"]),
        helper.make_node("MatMul", ["x", "w"], ["b"]),
        helper.make_node("Add", ["a", "b"], ["y"]),
    ]
    weights = {name: np.ones((3, 4), np.float32) for name in "vw"}
    model = make_model(nodes, {"x": [2, 3]}, {"y": [2, 4]}, weights)
    result = normal(model)
    assert len(result.graph.initializer) == 1
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(run_onnx(result, {"x": x})[0], run_onnx(model, {"x": x})[0])


def test_a_failure_of_onnxslim_leaves_the_model_as_it_is(
    make_model: ModelMaker, monkeypatch: Any, run_onnx: Any
) -> None:
    def fail(_: onnx.ModelProto) -> onnx.ModelProto:
        raise RuntimeError("onnxslim failed")

    monkeypatch.setattr("onnxslim.slim", fail)
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Identity", ["a"], ["y"])]
    result = normal(make_model(nodes, {"x": [2]}, {"y": [2]}))
    np.testing.assert_array_equal(run_onnx(result, {"x": np.array([-1, 1], np.float32)})[0], [0, 1])


def test_outputs_that_onnxslim_renames_are_not_accepted(make_model: ModelMaker, monkeypatch: Any) -> None:
    def rename(model: onnx.ModelProto) -> onnx.ModelProto:
        model.graph.node[0].output[0] = model.graph.output[0].name = "other"
        return model

    monkeypatch.setattr("onnxslim.slim", rename)
    result = normal(make_model([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]}))
    assert [output.name for output in result.graph.output] == ["y"]


def test_every_node_has_a_unique_name(make_model: ModelMaker) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["y"])]
    names = [node.name for node in normal(make_model(nodes, {"x": [2]}, {"y": [2]})).graph.node]
    assert all(names)
    assert len(set(names)) == len(names)


def same_as_before(model: onnx.ModelProto, run_onnx: Any, shape: tuple[int, ...]) -> None:
    x = np.random.RandomState(1).randn(*shape).astype("f4")
    want = run_onnx(model, {"x": x})[0]
    np.testing.assert_allclose(run_onnx(normal(model), {"x": x})[0], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 1, 1), (8, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_a_factor_as_long_as_the_channels_on_any_axis(
    make_model: ModelMaker, run_onnx: Any, op: str, shape: tuple[int, ...]
) -> None:
    random = np.random.RandomState(0)
    weights = {"w": random.randn(8, 8, 1, 1).astype("f4"), "s": random.randn(*shape).astype("f4")}
    nodes = [helper.make_node(op, ["x", "w"], ["a"]), helper.make_node("Mul", ["a", "s"], ["y"])]
    same_as_before(make_model(nodes, {"x": [1, 8, 8, 8]}, {"y": [None] * 4}, weights), run_onnx, (1, 8, 8, 8))


def test_a_factor_behind_a_product_that_others_read(make_model: ModelMaker, run_onnx: Any) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["a"], transB=1),
        helper.make_node("Reshape", ["a", "shape"], ["r"]),
        helper.make_node("Mul", ["r", "s"], ["p"]),
        helper.make_node("Relu", ["a"], ["q"]),
        helper.make_node("Reshape", ["q", "shape"], ["t"]),
        helper.make_node("Add", ["p", "t"], ["y"]),
    ]
    random = np.random.RandomState(0)
    weights = {"w": random.randn(8, 4).astype("f4"), "b": random.randn(8).astype("f4")}
    weights |= {"s": np.array(3, np.float32), "shape": np.array([2, 3, 8])}
    same_as_before(make_model(nodes, {"x": [6, 4]}, {"y": [2, 3, 8]}, weights), run_onnx, (6, 4))
