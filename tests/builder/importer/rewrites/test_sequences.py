"""Sequences of tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import helper

from tests.builder.importer.rewrites.cases import INT64, ModelMaker, operators


def test_a_split_sequence_is_taken_apart(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("SplitToSequence", ["x", "sizes"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "last"], ["tail"]),
        helper.make_node("SequenceInsert", ["s", "tail", "first"], ["longer"]),
        helper.make_node("SequenceErase", ["longer", "last"], ["shorter"]),
        helper.make_node("SequenceLength", ["shorter"], ["n"]),
        helper.make_node("ConcatFromSequence", ["shorter"], ["y"], axis=1),
    ]
    weights = {"sizes": np.array([2, 4]), "last": np.array(-1), "first": np.array(0)}
    model = make_model(nodes, {"x": [3, 6]}, {"y": [3, 6], "n": ([], INT64)}, weights)
    assert not any("Sequence" in op for op in operators(agrees(model, noise(3, 6))))


def test_a_stack_of_a_constructed_sequence(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    nodes = [
        helper.make_node("SequenceConstruct", ["x", "x", "w"], ["s"]),
        helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=-1, new_axis=1),
    ]
    agrees(
        make_model(nodes, {"x": [2, 3]}, {"y": [2, 3, 3]}, {"w": np.ones((2, 3), np.float32)}), noise(2, 3)
    )


def test_a_map_over_a_sequence(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Mul", ["a", "b"], ["product"])],
        "body",
        [info("a", 1, None), info("b", 1, None)],
        [info("sum", 1, None), info("product", 1, None)],
    )
    nodes = [
        helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
        helper.make_node("SequenceMap", ["s", "w"], ["t", "u"], body=body),
        helper.make_node("SequenceMap", ["u", "t"], ["v", "rest"], body=body),
        helper.make_node("ConcatFromSequence", ["v"], ["y"], axis=0),
    ]
    model = make_model(nodes, {"x": [4, 6]}, {"y": [4, 6]}, {"w": np.full((1, 6), 0.5, np.float32)})
    assert not any("Sequence" in op for op in operators(agrees(model, noise(4, 6))))
