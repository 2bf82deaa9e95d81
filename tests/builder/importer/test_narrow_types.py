"""Weights in 4 and 8 bits, as storage."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.importer import import_onnx

VALUES = np.array([[1, 2, -3], [0, 1, 2], [3, -2, 1], [1, 1, 1]], np.float32)
SCALES = np.array([0.5, 2, 0.25], np.float32)


def stored(kind: str, how: str, scale: np.ndarray | None = None) -> onnx.ModelProto:
    """y = x W, with W stored as `kind`."""
    values = np.abs(VALUES) if kind.startswith("U") else VALUES
    weight = helper.make_tensor("w", getattr(TensorProto, kind), [4, 3], values.reshape(-1).tolist())
    tensors = [weight]
    if how == "Cast":
        first = helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT)
    else:
        tensors.append(numpy_helper.from_array(np.float32(0.5) if scale is None else scale, "s"))
        first = helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=1)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    nodes = [first, helper.make_node("MatMul", ["x", "f"], ["y"])]
    graph = helper.make_graph(nodes, "stored", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.mark.parametrize("how", ["Cast", "DequantizeLinear"])
@pytest.mark.parametrize(
    "kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT4E2M1", "INT4", "UINT4", "INT8"]
)
def test_narrow_weights_keep_their_values(run_onnx: Any, kind: str, how: str) -> None:
    x = np.random.RandomState(0).randn(2, 4).astype("f4")
    found = run_onnx(import_onnx(stored(kind, how)).onnx, {"x": x})[0]
    wanted = x @ (np.abs(VALUES) if kind.startswith("U") else VALUES) * (0.5 if how != "Cast" else 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "INT4"])
def test_a_scale_for_each_column(run_onnx: Any, kind: str) -> None:
    x = np.random.RandomState(0).randn(2, 4).astype("f4")
    model = stored(kind, "DequantizeLinear", SCALES)
    found = run_onnx(import_onnx(model).onnx, {"x": x})[0]
    np.testing.assert_allclose(found, x @ (VALUES * SCALES), rtol=1e-6, atol=1e-6)
