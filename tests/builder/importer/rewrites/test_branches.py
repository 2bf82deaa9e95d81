"""`If` on a value that comes with a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from builder.importer import import_onnx
from builder.importer.large_models import open_session
from tests.builder.importer.rewrites.cases import BOOL, ModelMaker, operators


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 3])
    return helper.make_graph(list(nodes), name, [], [output])


def choice(make_model: ModelMaker, then: onnx.NodeProto, other: onnx.NodeProto) -> onnx.ModelProto:
    node = helper.make_node(
        "If", ["go"], ["y"], name="choose", then_branch=branch("a", then), else_branch=branch("b", other)
    )
    return make_model([node], {"go": ([], BOOL), "x": [2, 3], "z": [2, 3]}, {"y": [2, 3]})


@pytest.mark.parametrize("go", [True, False])
def test_the_branch_is_chosen_at_run_time(
    make_model: ModelMaker, noise: Any, run_onnx: Any, go: bool
) -> None:
    then = helper.make_node("Add", ["x", "z"], ["out"])
    model = choice(make_model, then, helper.make_node("Sqrt", ["x"], ["out"]))
    imported = import_onnx(model).onnx
    assert "If" not in operators(imported)
    feeds = {"go": np.array(go), "x": noise(2, 3), "z": noise(2, 3)}
    np.testing.assert_array_equal(run_onnx(imported, feeds)[0], run_onnx(model, feeds)[0])


@pytest.mark.parametrize("go", [True, False])
def test_a_division_by_a_real_number_is_chosen_too(
    make_model: ModelMaker, noise: Any, run_onnx: Any, go: bool
) -> None:
    """Of zeros it makes NaN, which is not selected."""
    model = choice(
        make_model, helper.make_node("Div", ["x", "z"], ["out"]), helper.make_node("Neg", ["x"], ["out"])
    )
    z = noise(2, 3) if go else np.zeros((2, 3), np.float32)
    feeds = {"go": np.array(go), "x": noise(2, 3), "z": z}
    imported = import_onnx(model).onnx
    np.testing.assert_array_equal(run_onnx(imported, feeds)[0], run_onnx(model, feeds)[0])


@pytest.mark.parametrize("go", [True, False])
def test_a_division_that_the_condition_guards_against_zero(
    make_model: ModelMaker, run_onnx: Any, go: bool
) -> None:
    output = helper.make_tensor_value_info("out", TensorProto.INT32, [2, 3])
    parts = [helper.make_node("Div", ["x", "z"], ["out"]), helper.make_node("Neg", ["x"], ["out"])]
    then, other = (
        helper.make_graph([part], name, [], [output]) for part, name in zip(parts, "ab", strict=True)
    )
    node = helper.make_node("If", ["go"], ["y"], name="choose", then_branch=then, else_branch=other)
    kind = ([2, 3], TensorProto.INT32)
    model = make_model([node], {"go": ([], BOOL), "x": kind, "z": kind}, {"y": kind})
    imported = import_onnx(model).onnx
    assert "If" not in operators(imported)
    z = np.array([[3, -3, 2], [1, -1, 9]], np.int32) if go else np.zeros((2, 3), np.int32)
    feeds = {"go": np.array(go), "x": np.array([[7, 7, -9], [4, 4, 1]], np.int32), "z": z}
    expected = run_onnx(model, feeds)[0]
    session = open_session(imported, onnxruntime.SessionOptions())
    np.testing.assert_array_equal(session.run(None, feeds)[0], expected)
