"""An `If` on a constant becomes the branch that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.importer.control_flow import has_control_flow, inline_constant_ifs

ModelMaker = Callable[..., onnx.ModelProto]


def branch(operator: str, *, weight: float | None = None) -> onnx.GraphProto:
    """A branch that computes `operator(x, w)`, or returns `x` itself."""
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, [3])
    if weight is None:
        return helper.make_graph(
            [], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3])]
        )
    tensor = numpy_helper.from_array(np.full(3, weight, np.float32), "w")
    return helper.make_graph([helper.make_node(operator, ["x", "w"], ["out"])], "branch", [], [out], [tensor])


def choice(then: onnx.GraphProto, other: onnx.GraphProto, output: str = "y") -> onnx.NodeProto:
    return helper.make_node("If", ["c"], [output], name=output, then_branch=then, else_branch=other)


@pytest.mark.parametrize(("condition", "expected"), [(True, [4, 5, 6]), (False, [2, 4, 6])])
def test_the_branch_that_is_taken_replaces_the_if(
    make_model: ModelMaker, run_onnx: Any, condition: bool, expected: list[int]
) -> None:
    node = choice(branch("Add", weight=3), branch("Mul", weight=2))
    model = make_model([node], {"x": [3]}, {"y": [3]}, {"c": np.array(condition)})
    assert inline_constant_ifs(model) == 1
    assert not has_control_flow(model)
    (found,) = run_onnx(model, {"x": np.array([1, 2, 3], np.float32)})
    assert found.tolist() == expected


def test_two_branches_with_the_same_names_do_not_collide(make_model: ModelMaker, run_onnx: Any) -> None:
    nodes = [
        choice(branch("Add", weight=3), branch("Mul", weight=2), "a"),
        choice(branch("Mul", weight=5), branch("Mul", weight=2), "b"),
        helper.make_node("Sub", ["a", "b"], ["y"]),
    ]
    model = make_model(nodes, {"x": [3]}, {"y": [3]}, {"c": np.array(True)})
    assert inline_constant_ifs(model) == 2
    (found,) = run_onnx(model, {"x": np.array([1, 2, 3], np.float32)})
    assert found.tolist() == [-1, -5, -9]


def test_a_branch_may_return_an_outer_value(make_model: ModelMaker, run_onnx: Any) -> None:
    node = choice(branch("Identity"), branch("Mul", weight=2))
    model = make_model([node], {"x": [3]}, {"y": [3]}, {"c": np.array(True)})
    assert inline_constant_ifs(model) == 1
    x = np.array([1, 2, 3], np.float32)
    np.testing.assert_array_equal(run_onnx(model, {"x": x})[0], x)


def test_nested_ifs_are_replaced_one_level_at_a_time(make_model: ModelMaker) -> None:
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3])
    inner = helper.make_graph([choice(branch("Add", weight=3), branch("Mul", weight=2))], "inner", [], [out])
    node = choice(inner, branch("Mul", weight=2))
    model = make_model([node], {"x": [3]}, {"y": [3]}, {"c": np.array(True)})
    assert [inline_constant_ifs(model) for _ in range(3)] == [1, 1, 0]
    assert not has_control_flow(model)


def test_an_if_on_an_input_stays(make_model: ModelMaker) -> None:
    node = choice(branch("Add", weight=3), branch("Mul", weight=2))
    model = make_model([node], {"x": [3], "c": ([], TensorProto.BOOL)}, {"y": [3]})
    assert inline_constant_ifs(model) == 0
    assert has_control_flow(model)
