from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from agent.bundle.quantisation import Quantised
from agent.runtime.quantisation import to_input, to_real


@pytest.mark.parametrize("zero", [0, 1, -128, 127, -37])
@pytest.mark.parametrize("scale", [1 / 255, 0.0078125, 0.1, 3.0])
def test_integers_are_those_of_onnx_runtime(scale: float, zero: int) -> None:
    single = float(np.float32(scale))
    values = np.arange(-300, 300, dtype=np.float32) * np.float32(scale / 2)  # every second one is between two
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [600])],
            [helper.make_tensor_value_info("y", TensorProto.INT8, [600])],
            [
                helper.make_tensor("s", TensorProto.FLOAT, [], [single]),
                helper.make_tensor("z", TensorProto.INT8, [], [zero]),
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.checker.check_model(model)
    [expected] = ort.InferenceSession(model.SerializeToString()).run(None, {"x": values})
    np.testing.assert_array_equal(to_input(values, "int8", Quantised("x", single, zero)), expected)


@pytest.mark.parametrize(("dtype", "zero"), [("int8", -5), ("uint8", 3), ("int16", 0)])
def test_what_is_out_of_range_is_clipped(dtype: str, zero: int) -> None:
    limits = np.iinfo(dtype)
    found = to_input(np.array([-1e9, 0.0, 1e9]), dtype, Quantised("x", 0.01, zero))
    assert found.tolist() == [limits.min, zero, limits.max] and found.dtype == dtype


def test_without_a_scale_integers_are_rounded_and_floats_stay() -> None:
    values = np.array([-0.6, 1.4, 300.0])
    assert to_input(values, "uint8", None).tolist() == [0, 1, 255]
    assert to_input(values, "float32", None).tolist() == values.astype(np.float32).tolist()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32"])
def test_an_output_is_made_real(dtype: str) -> None:
    found = to_real(np.array([0, 3, 101], dtype), Quantised("x", 0.25, 3))
    assert found.tolist() == [-0.75, 0.0, 24.5] and found.dtype == np.float32
    plain = np.array([1], dtype)
    assert to_real(plain, None) is plain
