"""Every quotient of integers is defined in ONNX Runtime too, which would end the process otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.importer import import_onnx
from builder.importer.divisors import with_defined_quotients
from builder.importer.large_models import open_session
from tests.builder.importer.conftest import ModelMaker
from tests.builder.kernels.integer_quotients import EVERY_TYPE, operands, quotient

KINDS = {"truncated": ("Div", {}), "remainder": ("Mod", {"fmod": 1}), "floor remainder": ("Mod", {})}


def run(model: onnx.ModelProto, feeds: dict[str, Any]) -> np.ndarray[Any, Any]:
    session = open_session(model, onnxruntime.SessionOptions())
    (result,) = session.run(None, feeds)
    return np.asarray(result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", EVERY_TYPE)
def test_quotients_of_all_integers(make_model: ModelMaker, kind: str, dtype: str) -> None:
    a, b = operands(dtype)
    operator, options = KINDS[kind]
    what = (list(a.shape), helper.np_dtype_to_tensor_dtype(a.dtype))
    # The divisor's type is not written in the model.
    nodes = [
        helper.make_node("Identity", ["b"], ["c"]),
        helper.make_node(operator, ["a", "c"], ["y"], **options),
    ]
    model = make_model(nodes, {"a": what, "b": what}, {"y": what}, opset=18)
    np.testing.assert_array_equal(run(model, {"a": a, "b": b}), quotient(kind, a, b))


def test_old_opsets(make_model: ModelMaker) -> None:
    a, b = operands("int32")
    what = ([len(a)], TensorProto.INT32)
    model = make_model(
        [helper.make_node("Div", ["a", "b"], ["y"])], {"a": what, "b": what}, {"y": what}, opset=7
    )
    np.testing.assert_array_equal(run(model, {"a": a, "b": b}), quotient("truncated", a, b))


def test_a_quotient_in_a_branch(make_model: ModelMaker) -> None:
    what = ([3], TensorProto.INT64)
    body = helper.make_graph(
        [helper.make_node("Div", ["a", "b"], ["q"])],
        "then",
        [],
        [helper.make_tensor_value_info("q", *what[::-1])],
    )
    node = helper.make_node("If", ["go"], ["y"], then_branch=body, else_branch=body)
    model = make_model([node], {"go": ([], TensorProto.BOOL), "a": what, "b": what}, {"y": what})
    feeds = {"go": np.array(True), "a": np.array([4, -9, 5]), "b": np.array([0, 2, 0])}
    assert run(model, feeds).tolist() == [0, -4, 0]


@pytest.mark.parametrize("divisor", [np.array([3, 5], np.int32), np.array([0.0, -1.0], np.float32)])
def test_a_constant_divisor_that_cannot_fail_costs_nothing(
    make_model: ModelMaker, divisor: np.ndarray[Any, Any]
) -> None:
    what = ([2], helper.np_dtype_to_tensor_dtype(divisor.dtype))
    model = make_model([helper.make_node("Div", ["a", "b"], ["y"])], {"a": what}, {"y": what}, {"b": divisor})
    assert with_defined_quotients(model) is model


def test_constants_that_divide_by_zero_are_folded(make_model: ModelMaker) -> None:
    nodes = [helper.make_node("Mod", ["c", "z"], ["r"]), helper.make_node("Add", ["a", "r"], ["y"])]
    what = ([2], TensorProto.INT32)
    weights = {"c": np.array([7, 8], np.int32), "z": np.array([0, 3], np.int32)}
    imported = import_onnx(make_model(nodes, {"a": what}, {"y": what}, weights)).onnx
    assert [numpy_helper.to_array(tensor).tolist() for tensor in imported.graph.initializer] == [[0, 2]]
