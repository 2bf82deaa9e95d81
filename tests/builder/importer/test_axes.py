"""Axes that a tensor does not have."""

from __future__ import annotations

import onnx
import pytest

from builder.errors import ModelError
from builder.importer import import_onnx

NODES = [
    "y = CumSum(x, axis)",
    "y = ReduceSum(x, axes)",
    "y = ReduceLogSumExp(x, axes)",
    "y = Slice(x, one, two, axes)",
    "y = Gather <axis = {}> (x, one)",
    "y = ScatterElements <axis = {}> (x, places, x)",
    "q = ArgMax <axis = {}> (x) y = Cast <to = 1> (q)",
    "y = Softmax <axis = {}> (x)",
    "y, q = TopK <axis = {}> (x, one)",
]


def made(node: str, axis: int, opset: int = 18) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : {opset}]> g (float[2,3,4] x) => (float[] y)
        <int64 axis = {{{axis}}}, int64[1] axes = {{{axis}}}, int64[1] one = {{1}}, int64[1] two = {{2}},
         int64[1,1,1] places = {{0}}> {{ {node.format(axis)} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize("axis", [3, -4, 2**40, -(2**62)])
@pytest.mark.parametrize("node", NODES)
def test_an_axis_that_the_tensor_does_not_have_is_refused(node: str, axis: int) -> None:
    with pytest.raises(ModelError) as caught:
        import_onnx(made(node, axis))
    assert str(axis) in str(caught.value) or "axis" in str(caught.value).lower()
    assert "Error" not in str(caught.value).replace("ShapeInferenceError", "").replace(
        "TypeInferenceError", ""
    )


@pytest.mark.parametrize("axis", [2, -3])
@pytest.mark.parametrize("node", [node for node in NODES if "Scatter" not in node])
def test_the_first_and_the_last_axis_are_taken(node: str, axis: int) -> None:
    import_onnx(made(node, axis))


def test_an_old_softmax_may_begin_behind_the_last_axis() -> None:
    import_onnx(made("y = Softmax <axis = 2> (x)", 2, opset=11))


def test_axis_0_of_a_scalar_is_what_exporters_write() -> None:
    text = """<ir_version: 8, opset_import: ["" : 13]> g (float[3] x) => (float y)
        <int64[1] zero = {0}> { s = ReduceMax <keepdims = 0> (x) y = ReduceSum <keepdims = 0> (s, zero) }"""
    try:
        import_onnx(onnx.parser.parse_model(text))
    except ModelError as error:
        assert "expected an axis" not in str(error)
