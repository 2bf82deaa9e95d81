"""TVM's front end: its refusals and the types of its output."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tvm.ir import Call

from builder.calls.spans import bindings_of, names_of
from builder.errors import FrontEndError
from builder.importer.relax_module import convert, to_relax

ModelMaker = Callable[..., onnx.ModelProto]
INT64 = TensorProto.INT64


def test_specs_are_the_models_own(relu: onnx.ModelProto) -> None:
    made = to_relax(relu)
    assert [(spec.name, spec.dtype, spec.shape) for spec in made.inputs] == [("x", "float32", (2, 3))]
    assert [(spec.name, spec.dtype, spec.shape) for spec in made.outputs] == [("y", "float32", (2, 3))]


def test_a_refusal_says_whether_it_depends_on_values(make_model: ModelMaker) -> None:
    pad = helper.make_node("Pad", ["x", "pads"], ["y"])
    dynamic = make_model([pad], {"x": [2], "pads": ([2], INT64)}, {"y": [4]})
    with pytest.raises(FrontEndError) as caught:
        to_relax(dynamic)
    assert caught.value.depends_on_values

    top = helper.make_node("TopK", ["x", "k"], ["y", "i"], sorted=0)
    unsorted = make_model([top], {"x": [2, 3]}, {"y": [2, 1], "i": ([2, 1], INT64)}, {"k": np.array([1])})
    with pytest.raises(FrontEndError) as caught:
        to_relax(unsorted)
    assert not caught.value.depends_on_values


def test_a_shape_other_than_onnx_says_is_refused(relu: onnx.ModelProto) -> None:
    relu.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 2]))
    with pytest.raises(FrontEndError, match=r"output 'y': expected \[3, 2\] float32, got \[2, 3\] float32"):
        to_relax(relu)


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute 'shape'"),
        ValueError("expected relax.expr.Constant, got <class 'tvm.relax.expr.DataflowVar'>"),
        RuntimeError("Check failed: (shape) is false: ShapeExpr expected"),
        AssertionError(),
    ],
)
def test_no_reason_has_names_from_inside_tvm(
    relu: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("builder.importer.relax_module.from_onnx", fail)
    with pytest.raises(FrontEndError) as caught:
        convert(relu)
    assert str(caught.value) == "TVM's front end does not take it with these inputs and attributes"


@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.INT32])
def test_texts_are_named_as_the_reason(make_model: ModelMaker, dtype: int) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.STRING)
    model = make_model([node], {"x": ([4], dtype)}, {"y": ([4], TensorProto.STRING)})
    with pytest.raises(FrontEndError, match="reads or makes texts"):
        convert(model)


def test_the_front_end_marks_what_it_makes_of_each_node(make_model: ModelMaker) -> None:
    # Two branches: their operators are converted in turn, and normalised late.
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["g"], name="gemm", alpha=0.5),
        helper.make_node("LeakyRelu", ["x"], ["l"], name="leaky"),
        helper.make_node("HardSwish", ["g"], ["h"], name="swish"),
        helper.make_node("Add", ["h", "l"], ["y"], name="sum"),
    ]
    weights = {"w": np.ones((4, 4), "f4"), "b": np.ones(4, "f4")}
    mod = convert(make_model(nodes, {"x": [2, 4]}, {"y": [2, 4]}, weights))
    values = [binding.value for binding in bindings_of(mod)]
    found = [(str(value.op.name), names_of(value)) for value in values if isinstance(value, Call)]
    assert all(names for _, names in found)
    by_operator: dict[str, set[str]] = {}
    for operator, names in found:
        by_operator.setdefault(operator, set()).update(names)
    assert by_operator["relax.matmul"] == {"gemm"}
    assert by_operator["relax.nn.leakyrelu"] == {"leaky"}
    assert by_operator["relax.add"] >= {"gemm", "sum"}
    assert [names for _, names in found][-1] == ("sum",)
    assert {name for _, names in found for name in names} == {"gemm", "leaky", "swish", "sum"}
