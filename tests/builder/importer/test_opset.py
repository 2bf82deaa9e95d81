"""Opsets are converted into the range that TVM's front end and ONNX Runtime share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ModelError
from builder.importer.opset import NEWEST, OLDEST, convert_opset

ModelMaker = Callable[..., onnx.ModelProto]


def test_an_older_opset_is_raised_and_keeps_the_numbers(make_model: ModelMaker, run_onnx: Any) -> None:
    node = helper.make_node("ReduceSum", ["x"], ["y"], axes=[1], keepdims=0)
    weights = {"large": np.ones((64, 128), np.float32)}
    nodes = [helper.make_node("MatMul", ["w", "large"], ["x"]), node]
    model = make_model(nodes, {"w": [2, 64]}, {"y": [2]}, weights, opset=11)
    converted = convert_opset(model)
    assert converted.opset_import[0].version == OLDEST
    w = np.arange(128, dtype=np.float32).reshape(2, 64)
    for found, expected in zip(run_onnx(converted, {"w": w}), run_onnx(model, {"w": w}), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("opset", [OLDEST, 20, NEWEST])
def test_an_opset_in_the_range_stays(relu: onnx.ModelProto, opset: int) -> None:
    relu.opset_import[0].version = opset
    assert convert_opset(relu) is relu
    assert relu.opset_import[0].version == opset


def test_a_newer_opset_is_lowered_if_the_operators_have_not_changed(relu: onnx.ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    if newest <= NEWEST:
        pytest.skip("this onnx has no opset that ONNX Runtime lacks")
    relu.opset_import[0].version = newest
    assert convert_opset(relu).opset_import[0].version == NEWEST


def test_a_newer_opset_is_lowered_by_onnx_if_operators_have_changed(
    make_model: ModelMaker, run_onnx: Any
) -> None:
    newest = onnx.defs.onnx_opset_version()
    if newest <= NEWEST or onnx.defs.get_schema("QuantizeLinear", newest).since_version <= NEWEST:
        pytest.skip("this onnx has no newer QuantizeLinear than ONNX Runtime")
    node = helper.make_node("QuantizeLinear", ["x", "scale"], ["y"])
    model = make_model([node], {"x": [2]}, {"y": [2]}, {"scale": np.float32(0.5)}, opset=newest)
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.UINT8
    converted = convert_opset(model)
    assert converted.opset_import[0].version == NEWEST
    assert run_onnx(converted, {"x": np.array([1, 2.75], np.float32)})[0].tolist() == [2, 6]


def test_roi_align_of_a_new_opset_runs(make_model: ModelMaker, run_onnx: Any) -> None:
    node = helper.make_node("RoiAlign", ["x", "rois", "of"], ["y"])
    weights = {"rois": np.array([[0, 0, 2, 2]], np.float32), "of": np.array([0])}
    model = make_model([node], {"x": [1, 1, 4, 4]}, {"y": [1, 1, 1, 1]}, weights, opset=22)
    converted = convert_opset(model)
    assert run_onnx(converted, {"x": np.ones((1, 1, 4, 4), np.float32)})[0].tolist() == [[[[1]]]]


@pytest.mark.parametrize(("opset", "operator"), [(1, "LpPool"), (8, "Scan")])
def test_an_old_model_that_cannot_be_converted_is_refused(
    make_model: ModelMaker, opset: int, operator: str
) -> None:
    if operator == "LpPool":
        node = helper.make_node("LpPool", ["x"], ["y"], kernel_shape=[2, 2])
        model = make_model([node], {"x": [1, 2, 4, 4]}, {"y": None}, opset=opset)
    else:
        value = lambda name: helper.make_tensor_value_info(name, 1, [2])  # noqa: E731
        add = helper.make_node("Add", ["s", "a"], ["t"])
        body = helper.make_graph([add], "body", [value("s"), value("a")], [value("t")])
        node = helper.make_node("Scan", ["", "z", "x"], ["y"], body=body, num_scan_inputs=1)
        model = make_model([node], {"z": [1, 2], "x": [1, 3, 2]}, {"y": [1, 2]}, opset=opset)
    with pytest.raises(ModelError, match=f"opset {opset} cannot be converted.*{operator}") as caught:
        convert_opset(model)
    assert caught.value.hint


@pytest.mark.parametrize("opset", [16, 17])
def test_extremes_that_an_older_opset_does_not_have(
    make_model: ModelMaker, run_onnx: Any, opset: int
) -> None:
    def model(version: int) -> onnx.ModelProto:
        nodes = [
            helper.make_node("ScatterElements", ["x", "i", "x"], ["s"], axis=1, reduction="max"),
            helper.make_node("Softmax", ["s"], ["y"]),
        ]
        inputs = {"x": [2, 3], "i": ([2, 3], TensorProto.INT64)}
        return make_model(nodes, inputs, {"y": [2, 3]}, opset=version)

    given = {"x": np.array([[3, 1, 2], [5, 4, 6]], np.float32), "i": np.array([[0, 0, 1], [2, 2, 2]])}
    [found] = run_onnx(convert_opset(model(opset)), given)
    np.testing.assert_allclose(found, run_onnx(model(18), given)[0], rtol=1e-6)
