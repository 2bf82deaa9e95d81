"""Operators of com.microsoft on codes of 8 and 16 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker
from tests.builder.importer.rewrites.microsoft.contrib import Node, imported_outputs, randn, run_unoptimised

STEP, WIDE = np.array(0.05, np.float32), np.array(0.11, np.float32)
BYTE = np.array(3, np.uint8)


def codes(*shape: int, dtype: str = "u1") -> NDArray[Any]:
    return np.random.RandomState(3).randint(0, 120, shape).astype(dtype)


def check_codes(node: Node) -> None:
    """Compare with ONNX Runtime, which adds integers: a code may be one apart."""
    (wanted,) = run_unoptimised(node.model(), node.feeds())
    (found,) = imported_outputs(node, [wanted])
    assert found.dtype == wanted.dtype
    apart = np.abs(found.astype("i4") - wanted.astype("i4"))
    assert apart.max() <= 1
    assert apart.mean() < 0.1


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("dtype", ["u1", "i1"])
@pytest.mark.parametrize("shape", [(2, 5, 4, 3), (1, 7, 3), (1, 3, 4, 5, 2)], ids=str)
def test_poolings_of_either_layout(last: int, dtype: str, shape: tuple[int, ...]) -> None:
    rest: list[NDArray[Any] | None] = [STEP, np.array(3, dtype), WIDE, np.array(7, dtype)]
    rank = len(shape) - 2
    window = {"kernel_shape": [2] * rank, "pads": [1] * 2 * rank, "strides": [2] * rank}
    for op, how in (("QLinearGlobalAveragePool", {}), ("QLinearAveragePool", window)):
        check_codes(
            Node(
                op,
                [codes(*shape, dtype=dtype), *rest],
                range(1, 5),
                attributes={"channels_last": last, **how},
            )
        )


@pytest.mark.parametrize("last", [0, 1])
def test_a_convolution_of_either_layout(last: int) -> None:
    x = codes(1, 6, 5, 4)
    weights = (codes(2, 4 if last else 6, 3, 3) - 60).astype("i1")
    inputs: list[NDArray[Any] | None] = [
        *(x, STEP, BYTE, weights, STEP, np.array(0, np.int8)),
        *(np.array(3, np.float32), BYTE),
    ]
    how = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [2, 1], "channels_last": last}
    check_codes(Node("QLinearConv", inputs, range(1, 8), attributes=how))


@pytest.mark.parametrize(("opset", "axis"), [(9, 1), (9, 2), (13, 1), (13, -1)])
def test_softmax_of_an_old_opset_takes_all_axes_behind_one(opset: int, axis: int) -> None:
    inputs: list[NDArray[Any] | None] = [
        codes(2, 3, 4),
        STEP,
        BYTE,
        np.array(1 / 256, np.float32),
        np.array(0, np.uint8),
    ]
    check_codes(Node("QLinearSoftmax", inputs, range(1, 5), attributes={"axis": axis, "opset": opset}))


@pytest.mark.parametrize("opset", [11, 13, 17, 20])
@pytest.mark.parametrize(("dtype", "zero"), [("u2", 300), ("i2", -77), ("u1", 9)])
def test_codes_of_16_bits_below_opset_21(make_model: ModelMaker, opset: int, dtype: str, zero: int) -> None:
    domain = "com.microsoft"
    weights = {"s": np.array([0.01, 0.002, 0.3], np.float32), "z": np.array([zero, 0, 5], dtype)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], domain=domain, axis=1),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], domain=domain, axis=1),
    ]
    model = make_model(nodes, {"x": [2, 3, 4]}, {"y": [2, 3, 4]}, weights, opset=opset)
    model.opset_import.append(helper.make_opsetid(domain, 1))
    feeds = {"x": randn(2, 3, 4) * 30}
    imported = import_onnx(model)
    assert imported.outputs[0].shape == (2, 3, 4)
    assert imported.onnx.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    np.testing.assert_array_equal(run_unoptimised(imported.onnx, feeds), run_unoptimised(model, feeds))
