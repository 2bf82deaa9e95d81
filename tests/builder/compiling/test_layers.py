"""Every kernel knows the nodes that it computes, and every node what became of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiling.layers import Layers
from builder.compiling.lower import fuse
from builder.importer import import_onnx
from tests.builder.kernels.machines import machine

F4 = TensorProto.FLOAT


def layers_of(
    nodes: Sequence[onnx.NodeProto], x: Sequence[int], outputs: Sequence[str], **weights: Sequence[int]
) -> Layers:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", F4, x)],
        [helper.make_tensor_value_info(name, F4, None) for name in outputs],
        [
            numpy_helper.from_array(np.random.RandomState(seed).rand(*shape).astype("f4"), name)
            for seed, (name, shape) in enumerate(weights.items())
        ],
    )
    model = import_onnx(
        onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        )
    )
    return Layers(model, fuse(model.mod, machine(8))["main"])


@pytest.mark.slow
def test_a_network_with_a_shuffle_and_a_batch_norm() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="/stem/Conv", pads=[1] * 4, strides=[2, 2]),
        helper.make_node("BatchNormalization", ["c", "s", "s", "s", "s"], ["n"], name="/stem/Bn"),
        helper.make_node("Relu", ["n"], ["r"], name="/stem/Relu"),
        helper.make_node("Shape", ["r"], ["unused"], name="shape"),
        helper.make_node("Add", ["s", "s"], ["s2"], name="weights"),
        helper.make_node("Mul", ["r", "s3"], ["m"], name="scale"),
        helper.make_node("Unsqueeze", ["s2", "axes"], ["s3"], name="as planes"),
        helper.make_node("Conv", ["m", "d"], ["e"], name="depthwise", group=8),
        helper.make_node("Identity", ["e"], ["f"], name="identity"),
        helper.make_node("GlobalAveragePool", ["f"], ["y"], name="pool"),
    ]
    nodes[5], nodes[6] = nodes[6], nodes[5]
    nodes.insert(0, helper.make_node("Constant", [], ["axes"], name="ax", value_ints=[1, 2]))
    layers = layers_of(nodes, (1, 3, 16, 16), ["y"], w=(8, 3, 3, 3), s=(8,), d=(8, 1, 3, 3))
    fates = {fate.name: fate for fate in layers.fates}
    stem = fates["/stem/Conv"]
    assert stem.fate == fates["/stem/Bn"].fate == "kernel"
    assert {"/stem/Bn", "/stem/Relu"} <= set(stem.fused_with)
    assert fates["shape"].fate == "unused"
    assert fates["weights"].fate == fates["as planes"].fate == "folded"
    assert fates["identity"].fate == "no work"
    assert fates["depthwise"].kernels
    found = list(layers.by_call.values())
    assert all(layer.nodes for layer in found)
    first = next(layer for layer in found if "/stem/Conv" in layer.names)
    assert first.window == "3x3 /2"
    assert first.reads == ("1x3x16x16",)
    assert first.writes == ("1x8x8x8",)
    assert next(layer.window for layer in found if "depthwise" in layer.names) == "3x3 g8"


@pytest.mark.slow
def test_nodes_in_a_branch_have_their_own_names() -> None:
    branch = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["inner"], name="/cell/MatMul")],
        "then",
        [],
        [helper.make_tensor_value_info("inner", F4, (4, 8))],
    )
    other = helper.make_graph(
        [helper.make_node("MatMul", ["x", "v"], ["other"], name="/other/MatMul")],
        "else",
        [],
        [helper.make_tensor_value_info("other", F4, (4, 8))],
    )
    nodes = [
        helper.make_node("Constant", [], ["yes"], name="yes", value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["a"], name="/if", then_branch=branch, else_branch=other),
        helper.make_node("Tanh", ["a"], ["y"], name="tanh"),
    ]
    layers = layers_of(nodes, (4, 8), ["y"], w=(8, 8), v=(8, 8))
    named = [node for layer in layers.by_call.values() for node in layer.nodes]
    assert sorted(named) == ["MatMul /cell/MatMul", "Tanh tanh"]
    assert {fate.name: fate.fate for fate in layers.fates}["/if"] == "kernel"


@pytest.mark.slow
def test_a_decomposed_layer_norm_and_products_of_one_value() -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], name="n/mean", axes=[-1]),
        helper.make_node("Sub", ["x", "mean"], ["centred"], name="n/sub"),
        helper.make_node("Mul", ["centred", "centred"], ["square"], name="n/square"),
        helper.make_node("ReduceMean", ["square"], ["variance"], name="n/variance", axes=[-1]),
        helper.make_node("Add", ["variance", "eps"], ["v"], name="n/add"),
        helper.make_node("Sqrt", ["v"], ["sd"], name="n/sqrt"),
        helper.make_node("Div", ["centred", "sd"], ["norm"], name="n/div"),
        helper.make_node("MatMul", ["norm", "wq"], ["q"], name="query"),
        helper.make_node("MatMul", ["norm", "wk"], ["k"], name="key"),
        helper.make_node("Tanh", ["q"], ["tq"], name="tanh q"),
        helper.make_node("Tanh", ["k"], ["tk"], name="tanh k"),
    ]
    layers = layers_of(nodes, (1, 16, 32), ["tq", "tk"], wq=(32, 32), wk=(32, 32), eps=(1,))
    found = [layer.names for layer in layers.by_call.values()]
    norm = next(names for names in found if "n/div" in names)
    assert set(norm) == {f"n/{part}" for part in ("mean", "sub", "square", "variance", "add", "sqrt", "div")}
    products = {names[0]: set(names[1:]) for names in found if names[0] in ("query", "key")}
    assert products.keys() == {"query", "key"}
    assert products["query"] <= {"tanh_q"}
    assert products["key"] <= {"tanh_k"}
    assert all(fate.fate == "kernel" for fate in layers.fates)
