"""Special numbers in samples: which inputs get them, and that a wrong rewrite is found by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, shape_inference

from agent.bundle.tensor_spec import TensorSpec
from builder.compiler import compile
from builder.compiling.special_samples import MOST, special_samples
from builder.errors import ParityError
from builder.importer import import_onnx
from builder.importer.normalise import normalise

F, I32, I64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def made(
    nodes: list[onnx.NodeProto], inputs: dict[str, tuple[int, list[int]]], kind: int = F
) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, *spec) for name, spec in inputs.items()]
    weights = [
        numpy_helper.from_array(np.ones((4, 4), "f4"), "w"),
        numpy_helper.from_array(np.float32(2), "two"),
    ]
    output = [helper.make_tensor_value_info("y", kind, None)]
    graph = helper.make_graph(nodes, "g", ends, output, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return shape_inference.infer_shapes(model)


def drawn(model: onnx.ModelProto, original: Sequence[str] = ()) -> Sequence[dict[str, np.ndarray]]:
    specs = [
        TensorSpec.from_dtype(
            value.name,
            np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)).name,
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
        )
        for value in model.graph.input
    ]
    first = {spec.name: np.full(spec.shape, 1, spec.dtype) for spec in specs}
    return list(special_samples(specs, model, first, original=original))


@pytest.mark.parametrize("size", [6, 10, 100])
def test_every_special_number_comes_at_least_once(size: int) -> None:
    samples = drawn(made([helper.make_node("Add", ["x", "two"], ["y"])], {"x": (F, [size])}))
    assert len(samples) <= MOST
    numbers = np.concatenate([sample["x"] for sample in samples])
    assert np.isnan(numbers).any()
    assert {np.inf, -np.inf, 0.5, -2.5, -1, np.float32(1e20)} <= set(numbers.tolist())
    zeros = numbers[numbers == 0]
    assert np.signbit(zeros).any()
    assert not np.signbit(zeros).all()


def test_the_numbers_of_two_inputs_meet_in_many_pairs() -> None:
    model = made([helper.make_node("Sub", ["x", "z"], ["y"])], {"x": (F, [2000]), "z": (F, [2000])})
    sample = drawn(model)[0]
    pairs = {(str(a), str(b)) for a, b in zip(sample["x"], sample["z"], strict=True)}
    assert {("nan", "0.0"), ("inf", "inf"), ("inf", "-inf"), ("0.0", "inf"), ("-0.0", "0.0")} <= pairs
    assert len(pairs) > 200


def test_huge_products_that_cancel_are_rounding() -> None:
    inputs = {name: (F, [40]) for name in "xzuv"}
    products = [helper.make_node("Mul", [*pair], [pair]) for pair in ("xz", "uv")]
    compile(import_onnx(made([*products, helper.make_node("Sub", ["xz", "uv"], ["y"])], inputs)))


def test_a_model_that_sums_gets_numbers_of_ordinary_size() -> None:
    (sample, *_) = drawn(made([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (F, [64, 4])}))
    finite = np.abs(sample["x"][np.isfinite(sample["x"])])
    assert finite.max() < 3
    assert (finite == 0).any()
    assert np.isnan(sample["x"]).any()


@pytest.mark.parametrize(("operator", "is_finite"), [("DFT", True), ("Resize", True), ("Shape", False)])
def test_an_operator_that_became_sums_gets_finite_numbers(operator: str, is_finite: bool) -> None:
    model = made([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": (F, [64, 4])})
    (sample, *_) = drawn(model, [operator, "MatMul"])
    assert np.isfinite(sample["x"]).all() == is_finite
    assert (sample["x"] == 0).any()


@pytest.mark.slow
def test_statistics_of_a_norm_are_not_compared_on_infinity() -> None:
    """ONNX Runtime's mean of a row with an infinity is one, ours is NaN."""
    graph = """<ir_version: 8, opset_import: ["" : 17]> g (float[4,8] x, float[8] w)
        => (float[4,8] y, float[4,1] mean) { y, mean = LayerNormalization(x, w) }"""
    compile(import_onnx(onnx.parser.parse_model(graph)))


def test_a_model_that_may_pass_over_a_nan_gets_finite_numbers() -> None:
    pool = helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2])
    (sample, *_) = drawn(made([pool], {"x": (F, [1, 2, 64])}))
    assert np.isfinite(sample["x"]).all()
    assert (sample["x"] < 0).any()
    roots = [
        helper.make_node("Sqrt", ["x"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["y"], kernel_shape=[2]),
    ]
    assert drawn(made(roots, {"x": (F, [1, 2, 64])})) == []


def test_integers_have_the_limits_of_their_type_where_any_number_is_allowed() -> None:
    sums = made([helper.make_node("Add", ["x", "z"], ["y"])], {"x": (I32, [9]), "z": (I32, [9])}, I32)
    assert {-(2**31), 2**31 - 1, 0} <= set(drawn(sums)[0]["x"].tolist())
    rows = made([helper.make_node("Gather", ["w", "x"], ["y"])], {"x": (I64, [9])})
    assert drawn(rows) == []
    quotients = made([helper.make_node("Div", ["x", "z"], ["y"])], {"x": (I32, [9]), "z": (I32, [9])}, I32)
    assert drawn(quotients) == []


def test_a_model_of_integers_gets_more_than_a_mask() -> None:
    sums = made([helper.make_node("CumSum", ["x", "axis"], ["y"])], {"x": (I32, [9])}, I32)
    sums.graph.initializer.append(numpy_helper.from_array(np.int64(0), "axis"))
    [sample, *_] = drawn(sums, ["CumSum"])
    assert {-3, 7} <= set(sample["x"].tolist())
    assert abs(sample["x"]).max() < 9


def test_a_sum_without_numbers_has_none_of_them() -> None:
    assert drawn(made([helper.make_node("Add", ["x", "two"], ["y"])], {"x": (F, [0])})) == []


def losing(monkeypatch: pytest.MonkeyPatch, before: list[str], after: list[str]) -> None:
    """Let the importer replace a model by another one that is equal for ordinary numbers."""

    def wrong(model: onnx.ModelProto, *arguments: Any) -> onnx.ModelProto:
        assert [node.op_type for node in model.graph.node] == before
        del model.graph.node[:]
        names = ["x", *(f"t{place}" for place in range(len(after) - 1)), "y"]
        for place, operator in enumerate(after):
            model.graph.node.append(
                helper.make_node(operator, [names[place]], [names[place + 1]], name=operator)
            )
        return normalise(model, *arguments)

    monkeypatch.setattr("builder.importer.onnx_import.normalise", wrong)


@pytest.mark.parametrize(
    ("nodes", "wrong"),
    [
        ([("Sub", ["x", "x"], "d"), ("Add", ["x", "d"], "y")], ["Identity"]),
        ([("Div", ["x", "x"], "d"), ("Mul", ["x", "d"], "y")], ["Identity"]),
        ([("Sqrt", ["x"], "d"), ("Mul", ["d", "d"], "y")], ["Abs"]),
        ([("Mul", ["x", "two"], "d"), ("Round", ["d"], "y")], ["Round"]),
    ],
)
def test_a_rewrite_that_holds_only_for_ordinary_numbers_is_found(
    monkeypatch: pytest.MonkeyPatch, nodes: list[tuple[str, list[str], str]], wrong: list[str]
) -> None:
    model = made([helper.make_node(op, ins, [out], name=op) for op, ins, out in nodes], {"x": (F, [8])})
    losing(monkeypatch, [op for op, _, _ in nodes], wrong)
    with pytest.raises(ParityError, match="after normalising, output y"):
        compile(import_onnx(model))
