"""Inputs of strings become places: ONNX Runtime gives the same for both; other uses of strings are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.importer.classic.string_inputs import Texts, replace_string_inputs

FLOAT, STRING, INT64 = TensorProto.FLOAT, TensorProto.STRING, TensorProto.INT64


def ml(operator: str, source: Sequence[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, source, [output], domain="ai.onnx.ml", **attributes)


def one_hot(source: str, output: str, *texts: str, zeros: int = 1) -> onnx.NodeProto:
    return ml("OneHotEncoder", [source], output, cats_strings=texts, zeros=zeros)


def ordinal(source: str, output: str, *texts: str) -> onnx.NodeProto:
    places = list(range(10, 10 + len(texts)))
    return ml("LabelEncoder", [source], output, keys_strings=texts, values_int64s=places, default_int64=-5)


def model(
    nodes: Sequence[onnx.NodeProto], widths: dict[str, int], outputs: dict[str, int], elem_type: int = STRING
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, elem_type, ["N", width]) for name, width in widths.items()],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.array([1], np.int64), "second")],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, int], dict[str, int]]] = {
    "one column": ([one_hot("a", "y", "red", "blue")], {"a": 1}, {"y": FLOAT}),
    "two encoders of one column": (
        [one_hot("a", "y", "red", "blue"), ordinal("a", "z", "blue", "green")],
        {"a": 1},
        {"y": FLOAT, "z": INT64},
    ),
    "two inputs joined, then chosen": (
        [
            helper.make_node("Concat", ["a", "b"], ["ab"], axis=1),
            ml("ArrayFeatureExtractor", ["ab", "second"], "chosen"),
            ordinal("chosen", "y", "blue", "red"),
            one_hot("a", "z", "green", "red"),
        ],
        {"a": 1, "b": 1},
        {"y": INT64, "z": FLOAT},
    ),
    # As skl2onnx writes the encoder of a single column of a data frame.
    "a column that is gathered": (
        [
            helper.make_node("Gather", ["a", "second"], ["chosen"], axis=1),
            one_hot("chosen", "y", "green", "red"),
            one_hot("a", "z", "red", "blue"),
        ],
        {"a": 2},
        {"y": FLOAT, "z": FLOAT},
    ),
    "one encoder of two columns": ([ordinal("a", "y", "red", "blue", "green")], {"a": 2}, {"y": INT64}),
}


@pytest.mark.parametrize("case", CASES)
def test_places_give_what_texts_give(case: str) -> None:
    nodes, widths, outputs = CASES[case]
    original, changed = model(nodes, widths, outputs), model(nodes, widths, outputs)
    texts = replace_string_inputs(changed)
    assert {name: len(each) for name, each in texts.items()} == widths
    given = {
        name: np.array([["red", "blue"], ["blue", "green"], ["pink", "red"]], object)[:, :width]
        for name, width in widths.items()
    }
    placed = {
        name: np.array(
            [
                [
                    texts[name][place].categories.index(text)
                    if text in texts[name][place].categories
                    else texts[name][place].unknown
                    for place, text in enumerate(row)
                ]
                for row in rows
            ],
            np.int64,
        )
        for name, rows in given.items()
    }
    expected = onnxruntime.InferenceSession(original.SerializeToString()).run(None, given)
    found = onnxruntime.InferenceSession(changed.SerializeToString()).run(None, placed)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_texts_and_what_is_unknown() -> None:
    found = replace_string_inputs(model([one_hot("a", "y", "x", "ü")], {"a": 1}, {"y": FLOAT}))
    assert found == {"a": (Texts(("x", "ü"), -1),)}
    strict = replace_string_inputs(model([one_hot("a", "y", "x", zeros=0)], {"a": 1}, {"y": FLOAT}))
    assert strict == {"a": (Texts(("x",), None),)}
    several = model([ordinal("a", "y", "x", "y")], {"a": 2}, {"y": INT64})
    assert replace_string_inputs(several) == {"a": (Texts(("x", "y"), -1),) * 2}


@pytest.mark.parametrize(
    "nodes",
    [
        [helper.make_node("Identity", ["a"], ["y"])],
        [helper.make_node("StringNormalizer", ["a"], ["y"])],
        [one_hot("a", "y", "x"), helper.make_node("Identity", ["a"], ["z"])],
        [helper.make_node("Equal", ["b", "a"], ["y"])],
        [helper.make_node("Concat", ["a", "a"], ["aa"], axis=0), one_hot("aa", "y", "x")],
        [ml("OneHotEncoder", ["a"], "y", cats_int64s=[1])],
        [],
    ],
)
def test_models_that_do_more_with_strings_are_left_as_they_are(nodes: list[onnx.NodeProto]) -> None:
    outputs = {"y": FLOAT, "z": STRING}
    before, after = model(nodes, {"a": 1}, outputs), model(nodes, {"a": 1}, outputs)
    assert replace_string_inputs(after) == {}
    assert after == before


def test_inputs_of_numbers_are_no_texts() -> None:
    nodes = [ml("OneHotEncoder", ["a"], "y", cats_int64s=[1])]
    assert replace_string_inputs(model(nodes, {"a": 1}, {"y": FLOAT}, INT64)) == {}
