"""Shapes and values of inputs: given, derived, chosen and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ShapeError
from builder.importer import import_onnx
from builder.importer.static_inputs import fix_inputs

ModelMaker = Callable[..., onnx.ModelProto]
INT64 = TensorProto.INT64


def dims(model: onnx.ModelProto) -> dict[str, list[int]]:
    return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}


@pytest.fixture
def two(make_model: ModelMaker) -> Callable[[Sequence[Any], Sequence[Any]], onnx.ModelProto]:
    """A model with two inputs, a and b, of the given dimensions."""

    def make(a: Sequence[Any], b: Sequence[Any]) -> onnx.ModelProto:
        nodes = [helper.make_node("Shape", [name], [f"s{name}"]) for name in "ab"]
        nodes.append(helper.make_node("Concat", ["sa", "sb"], ["y"], axis=0))
        return make_model(nodes, {"a": list(a), "b": list(b)}, {"y": ([None], INT64)})

    return make


def test_static_inputs_need_nothing(two: Any) -> None:
    model = two([1, 2], [3])
    notes: list[str] = []
    fix_inputs(model, {}, {}, notes.append)
    assert dims(model) == {"a": [1, 2], "b": [3]}
    assert notes == []


def test_a_batch_that_is_the_only_symbol_becomes_one_and_is_reported(two: Any) -> None:
    model = two(["N", 3, 8, 8], ["N", 4])
    notes: list[str] = []
    fix_inputs(model, {}, {}, notes.append)
    assert dims(model) == {"a": [1, 3, 8, 8], "b": [1, 4]}
    assert any("'a' [N,3,8,8]" in note and "is set to 1" in note for note in notes)


@pytest.mark.parametrize("batch", [None, "", 0, -1])
def test_an_unknown_batch_in_any_notation_becomes_one(two: Any, batch: Any) -> None:
    model = two([5, 3], [2])
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    if isinstance(batch, int):
        model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = batch
    fix_inputs(model, {}, {}, lambda _: None)
    assert dims(model)["a"] == [1, 3]


def test_a_given_batch_applies_to_all_inputs_that_share_its_symbol(two: Any) -> None:
    model = two(["N", 3], ["N", 4])
    fix_inputs(model, {"a": (5, 3)}, {}, lambda _: None)
    assert dims(model) == {"a": [5, 3], "b": [5, 4]}


def test_shared_symbols_are_solved(two: Any) -> None:
    model = two(["batch", "length"], ["batch", "length"])
    fix_inputs(model, {"a": (2, 7)}, {}, lambda _: None)
    assert dims(model)["b"] == [2, 7]


def test_a_vector_of_the_batch_follows_it(two: Any) -> None:
    model = two(["N", 3], ["N"])
    fix_inputs(model, {}, {}, lambda _: None)
    assert dims(model)["b"] == [1]


@pytest.mark.parametrize(
    ("a", "b", "fragment"),
    [
        (["batch", "length"], ["batch", "length"], "'a' [batch,length], 'b' [batch,length]"),
        ([1, "length"], [3], "'a' [1,length]"),
        (["N", 3], ["length"], "'b' [length]"),
        (["N"], [3], "'a' [N]"),
        ([None, None], [3], "'a' [?,?]"),
    ],
)
def test_other_unknown_dimensions_are_requested_by_name(two: Any, a: Any, b: Any, fragment: str) -> None:
    with pytest.raises(ShapeError) as caught:
        fix_inputs(two(a, b), {}, {}, lambda _: None)
    assert fragment in str(caught.value)
    assert "--input-shapes" in (str(caught.value.hint) or "")


@pytest.mark.parametrize(
    ("shapes", "fragment"),
    [
        ({"c": (1,)}, "no input 'c'; its inputs are a [N,3] float32, b [4] float32"),
        ({"a": (1, 3, 1)}, ": expected 2 dimensions, [N,3], got 3, [1,3,1]"),
        ({"a": (1, 5)}, ": expected [N,3], got [1,5]: dimension 1 is fixed at 3"),
        ({"b": (5,)}, ": expected [4], got [5]"),
        ({"a": (-1, 3)}, "integers from 0"),
        ({"a": (2**40, 3)}, "integers from 0"),
        ({"a": ()}, ": expected 2 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_with_what_was_expected(
    two: Any, shapes: Any, fragment: str
) -> None:
    with pytest.raises(ShapeError) as caught:
        fix_inputs(two(["N", 3], [4]), shapes, {}, lambda _: None)
    assert fragment in str(caught.value)


def test_one_symbol_with_two_sizes_is_refused(two: Any) -> None:
    with pytest.raises(ShapeError, match=r"'N': expected one size, got 2 from input 'a' and 5 from 'b'"):
        fix_inputs(two(["N", 3], ["N", 4]), {"a": (2, 3), "b": (5, 4)}, {}, lambda _: None)


def test_dimensions_that_are_only_marked_as_unknown_may_differ(two: Any) -> None:
    """Paddle's exporter writes "?" for the height and for the width."""
    model = two(["?", "?"], ["?"])
    fix_inputs(model, {"a": (2, 3), "b": (5,)}, {}, lambda _: None)
    assert dims(model) == {"a": [2, 3], "b": [5]}


def test_an_input_without_a_rank_takes_the_given_shape(two: Any) -> None:
    model = two([1], [2])
    model.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ShapeError, match="of unknown rank"):
        fix_inputs(model, {}, {}, lambda _: None)
    fix_inputs(model, {"a": (4, 5)}, {}, lambda _: None)
    assert dims(model)["a"] == [4, 5]


@pytest.fixture
def rate(make_model: ModelMaker) -> onnx.ModelProto:
    """y = x * 2 if the sampling rate is 16000, else x * 3, with an If."""

    def branch(factor: float) -> onnx.GraphProto:
        value = helper.make_tensor("value", TensorProto.FLOAT, [], [factor])
        nodes = [
            helper.make_node("Constant", [], ["factor"], value=value),
            helper.make_node("Mul", ["x", "factor"], ["product"]),
        ]
        return helper.make_graph(
            nodes, "b", [], [helper.make_tensor_value_info("product", TensorProto.FLOAT, [4])]
        )

    nodes = [
        helper.make_node("Equal", ["sr", "wide"], ["is_wide"]),
        helper.make_node(
            "If", ["is_wide"], ["y"], name="by_rate", then_branch=branch(2), else_branch=branch(3)
        ),
    ]
    return make_model(nodes, {"x": [4], "sr": ([], INT64)}, {"y": [4]}, {"wide": np.array(16000, np.int64)})


@pytest.mark.parametrize(("value", "factor"), [(16000, 2), (8000, 3)])
def test_a_value_folds_its_input_and_the_branch_that_depends_on_it(
    rate: onnx.ModelProto, run_onnx: Any, value: int, factor: float
) -> None:
    model = import_onnx(rate, input_values={"sr": value})
    assert [spec.name for spec in model.inputs] == ["x"]
    assert {node.op_type for node in model.onnx.graph.node} == {"Mul"}
    x = np.arange(4, dtype=np.float32)
    assert run_onnx(model.onnx, {"x": x})[0].tolist() == (x * factor).tolist()


def test_an_if_on_an_input_computes_both_branches(rate: onnx.ModelProto, run_onnx: Any) -> None:
    model = import_onnx(rate)
    assert [spec.name for spec in model.inputs] == ["x", "sr"]
    feeds = {"x": np.arange(4, dtype=np.float32), "sr": np.array(8000)}
    assert run_onnx(model.onnx, feeds)[0].tolist() == (feeds["x"] * 3).tolist()


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        ({"none": 1}, "no input 'none'"),
        ({"sr": 1.5}, ": expected int64"),
        ({"sr": [1, 2]}, ": expected [], got a value of [2]"),
        ({"x": [1, 2]}, ": expected [4], got a value of [2]"),
        ({"sr": "fast"}, ": expected int64"),
        ({"sr": 2**70}, ": expected int64"),
    ],
)
def test_values_that_do_not_fit_are_refused(rate: onnx.ModelProto, values: Any, fragment: str) -> None:
    with pytest.raises(ShapeError) as caught:
        import_onnx(rate, input_values=values)
    assert fragment in str(caught.value)


def test_one_number_fills_its_input(rate: onnx.ModelProto, run_onnx: Any) -> None:
    fix_inputs(rate, {}, {"x": 7}, lambda _: None)
    assert run_onnx(rate, {"sr": np.array(16000)})[0].tolist() == [14.0] * 4


def test_an_input_without_elements(make_model: ModelMaker, run_relax: Any) -> None:
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"], axes=[1]),
        helper.make_node("Add", ["top", "z"], ["y"]),
    ]
    model = make_model(nodes, {"x": [2, "n", 4], "z": [4]}, {"y": [2, 1, 4]})
    imported = import_onnx(model, input_shapes={"x": (2, 0, 4)})
    assert [spec.shape for spec in imported.inputs] == [(2, 0, 4), (4,)]
    empty, z = np.zeros((2, 0, 4), np.float32), np.ones(4, np.float32)
    assert np.array_equal(run_relax(imported.mod, [empty, z])[0], np.full((2, 1, 4), -np.inf, np.float32))
