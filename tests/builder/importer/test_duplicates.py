"""Only what computes the same bits is merged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from builder.importer.duplicates import merge_duplicates

ModelMaker = Callable[..., onnx.ModelProto]


def node(op: str, inputs: list[str], *outputs: str, **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, inputs, list(outputs), **attributes)


DIFFERENT = {
    "clips with the other bound": (node("Clip", ["x", "c"], "a"), node("Clip", ["x", "", "c"], "b"), [4]),
    "splits into other numbers": (
        node("Split", ["x"], "a", "c1", axis=0),
        node("Split", ["x"], "b", "d", "e", "f", axis=0),
        None,
    ),
    "zeros of both signs": (node("Div", ["x", "zero"], "a"), node("Div", ["x", "minus"], "b"), [4]),
    "random numbers": (
        node("RandomNormalLike", ["x"], "a"),
        node("RandomNormalLike", ["x"], "b"),
        [4],
    ),
}


@pytest.mark.parametrize("case", DIFFERENT, ids=str)
def test_values_that_differ_are_not_merged(make_model: ModelMaker, case: str) -> None:
    first, second, shape = DIFFERENT[case]
    weights = {"c": np.float32(0.3), "zero": np.float32(0.0), "minus": np.float32(-0.0)}
    last = node("Concat", ["a", "b"], "y", axis=0)
    model = make_model([first, second, last], {"x": shape or [4]}, {"y": [None]}, weights)
    merge_duplicates(model)
    assert len(model.graph.node) == 3
    assert len(model.graph.initializer) == 3


def test_a_chain_of_equal_nodes_is_merged(make_model: ModelMaker, run_onnx: Any) -> None:
    nodes = [node("Clip", ["x", "c"], "a"), node("Clip", ["x", "d", ""], "b"), node("Neg", ["a"], "e")]
    nodes += [node("Neg", ["b"], "f"), node("Add", ["e", "f"], "y")]
    model = make_model(nodes, {"x": [4]}, {"y": [4]}, {"c": np.float32(0.3), "d": np.float32(0.3)})
    feeds = {"x": np.linspace(-1, 1, 4, dtype=np.float32)}
    before = run_onnx(model, feeds)[0]
    merge_duplicates(model)
    assert [each.op_type for each in model.graph.node] == ["Clip", "Neg", "Add"]
    np.testing.assert_array_equal(run_onnx(model, feeds)[0], before)


def test_outputs_keep_their_names(make_model: ModelMaker, run_onnx: Any) -> None:
    model = make_model([node("Neg", ["x"], "y"), node("Neg", ["x"], "z")], {"x": [4]}, {"y": [4], "z": [4]})
    merge_duplicates(model)
    assert len(run_onnx(model, {"x": np.ones(4, np.float32)})) == 2
