"""The scales at a model's edges, as ONNX and TensorFlow Lite have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from agent.bundle.quantisation import Quantised
from builder.importer.edge_scales import EdgeScales, onnx_scales

node = helper.make_node
KINDS = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int16": TensorProto.INT16}


def scales(
    nodes: list[onnx.NodeProto],
    given: dict[str, Any],
    dtype: str = "int8",
    ends: tuple[str, ...] = ("x", "y"),
) -> EdgeScales:
    values = [helper.make_tensor_value_info(name, KINDS[dtype], [1, 2]) for name in ends]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    return onnx_scales(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))


@pytest.mark.parametrize(
    ("dtype", "zero"), [("int8", -128), ("int8", 7), ("uint8", 0), ("uint8", 131), ("int16", 0)]
)
@pytest.mark.parametrize("between", [(), ("Identity",), ("Transpose", "Reshape"), ("MaxPool",)])
def test_scales_are_read_through_what_only_moves(dtype: str, zero: int, between: tuple[str, ...]) -> None:
    nodes, name = [], "x"
    for place, kind in enumerate(between):
        nodes.append(node(kind, [name], [name := f"in{place}"]))
    nodes += [
        node("DequantizeLinear", [name, "s", "z"], ["f"]),
        node("QuantizeLinear", ["f", "t", "z"], ["q"]),
    ]
    name = "q"
    for place, kind in enumerate((*between, "Identity")):
        nodes.append(node(kind, [name], [name := "y" if place == len(between) else f"out{place}"]))
    given = {"s": np.float32(0.5), "t": np.array([0.25], np.float32), "z": np.array(zero, dtype)}
    found = scales(nodes, given, dtype)
    assert found.quantisation.inputs == (Quantised("x", 0.5, zero),)
    assert found.quantisation.outputs == (Quantised("y", 0.25, zero),)
    assert not found.obstacles


def test_a_missing_zero_point_is_0_and_constants_may_be_nodes() -> None:
    constant = node("Constant", [], ["s"], value=numpy_helper.from_array(np.float32(2)))
    found = scales([constant, node("DequantizeLinear", ["x", "s"], ["f"])], {}, "uint8")
    assert found.quantisation.inputs == (Quantised("x", 2.0, 0),)


def test_operators_on_integers_have_the_scales_themselves() -> None:
    names = ["x", "s", "z", "w", "s", "z", "t", "u"]
    given: dict[str, Any] = {"s": np.float32(0.5), "z": np.int8(1), "t": np.float32(4), "u": np.int8(-3)}
    given["w"] = np.ones((2, 2), np.int8)
    found = scales([node("QLinearMatMul", names, ["y"])], given)
    assert found.quantisation.inputs == (Quantised("x", 0.5, 1),)
    assert found.quantisation.outputs == (Quantised("y", 4.0, -3),)


@pytest.mark.parametrize(
    ("kind", "names", "reads"),
    [
        ("QLinearAdd", "x s z c s z t u", True),
        ("QLinearMul", "c t u x s z t u", True),
        ("QGemm", "x s z w s z  t u", True),
        ("QLinearSoftmax", "x s z t u", True),
        ("QLinearSigmoid", "x s z t u", True),
        ("QLinearLeakyRelu", "x s z t u", True),
        ("QLinearAveragePool", "x s z t u", True),
        ("QLinearGlobalAveragePool", "x s z t u", True),
        ("QLinearConcat", "t u c t u x s z", True),
        ("QLinearWhere", "which c t u x s z t u", True),
        ("QLinearWhere", "x c t u c t u t u", False),
    ],
)
def test_operators_of_onnx_runtime_have_scales_too(kind: str, names: str, reads: bool) -> None:
    given: dict[str, Any] = {"s": np.float32(0.5), "z": np.int8(1), "t": np.float32(4), "u": np.int8(-3)}
    given |= {"w": np.ones((2, 2), np.int8), "c": np.ones((1, 2), np.int8)}
    found = scales([node(kind, names.split(" "), ["y"], domain="com.microsoft")], given)
    assert found.quantisation.inputs == ((Quantised("x", 0.5, 1),) if reads else ())
    assert found.quantisation.outputs == (Quantised("y", 4.0, -3),)
    assert not found.obstacles


@pytest.mark.parametrize(
    ("given", "extra", "words"),
    [
        ({"s": np.array([1, 2], np.float32), "z": np.array([0, 0], np.int8)}, [], "slice of an axis"),
        ({"s": np.array([1, 1], np.float32), "z": np.array([0, 5], np.int8)}, [], "slice of an axis"),
        ({"z": np.int8(0)}, [node("Abs", ["a"], ["s"])], "no constant"),
        (
            {"s": np.float32(1), "t": np.float32(2), "z": np.int8(0)},
            [node("DequantizeLinear", ["x", "t", "z"], ["g"])],
            "several scales",
        ),
        ({"s": np.float32(0), "z": np.int8(0)}, [], "a scale of 0"),
    ],
)
def test_an_input_without_one_scale_has_an_obstacle(given: Any, extra: Any, words: str) -> None:
    found = scales([*extra, node("DequantizeLinear", ["x", "s", "z"], ["f"], axis=1)], given)
    assert not found.quantisation.inputs
    assert words in found.obstacles["x"]


def test_one_scale_that_is_written_for_each_slice_is_one() -> None:
    given = {"s": np.array([2, 2], np.float32), "z": np.array([3, 3], np.int8)}
    found = scales([node("DequantizeLinear", ["x", "s", "z"], ["f"], axis=1)], given)
    assert found.quantisation.inputs == (Quantised("x", 2.0, 3),)


def test_integers_that_stand_for_themselves_have_no_scale() -> None:
    found = scales([node("Cast", ["x"], ["f"], to=TensorProto.FLOAT), node("Identity", ["x"], ["y"])], {})
    assert found.declared is None and not found.obstacles
