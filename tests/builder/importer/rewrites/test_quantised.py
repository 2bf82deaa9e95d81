"""Operators on quantised tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import ModelMaker, operators


def test_quantised_convolution(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(3)
    weights = {
        "xs": np.float32(0.02),
        "xz": np.uint8(120),
        # Seven bits: on a processor with AVX2 but without VNNI, ONNX Runtime adds two products of eight bits
        # in sixteen, which saturates.
        "w": random.integers(-64, 64, (4, 3, 3, 3)).astype(np.int8),
        "ws": np.array([0.01, 0.02, 0.03, 0.015], np.float32),
        "wz": np.zeros(4, np.int8),
        "ys": np.float32(0.1),
        "yz": np.uint8(130),
        "b": random.integers(-500, 500, 4).astype(np.int32),
    }
    node = helper.make_node(
        "QLinearConv", ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz", "b"], ["y"], pads=[1] * 4
    )
    model = make_model(
        [node], {"x": ([1, 3, 6, 6], TensorProto.UINT8)}, {"y": ([1, 4, 6, 6], TensorProto.UINT8)}, weights
    )
    agrees(model, random.integers(0, 255, (1, 3, 6, 6)).astype(np.uint8), atol=1.01)


def test_quantised_matmul(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(4)
    weights = {
        "as": np.float32(0.02),
        "az": np.uint8(113),
        "b": random.integers(0, 255, (5, 3)).astype(np.uint8),
        "bs": np.float32(0.01),
        "bz": np.uint8(114),
        "ys": np.float32(0.02),
        "yz": np.uint8(118),
    }
    node = helper.make_node("QLinearMatMul", ["a", "as", "az", "b", "bs", "bz", "ys", "yz"], ["y"])
    types = {"a": ([2, 5], TensorProto.UINT8)}, {"y": ([2, 3], TensorProto.UINT8)}
    agrees(make_model([node], *types, weights), random.integers(0, 255, (2, 5)).astype(np.uint8), atol=1.01)


@pytest.mark.parametrize(
    ("a", "b", "y"),
    [
        ([2, 3, 4], [4], [2, 3]),
        ([3, 4], [4], [3]),
        ([3], [2, 3, 4], [2, 4]),
        ([4], [4, 2], [2]),
        ([4], [4], []),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_weight", [False, True])
def test_integer_products_of_vectors(
    make_model: ModelMaker, agrees: Any, a: list[int], b: list[int], y: list[int], is_weight: bool
) -> None:
    random = np.random.default_rng(6)
    kind = np.int8 if is_weight else np.uint8
    values = [random.integers(0, 100, a).astype(np.uint8), random.integers(0, 100, b).astype(kind)]
    weights = {"az": np.uint8(7), "bz": kind(3)} | ({"b": values[1]} if is_weight else {})
    inputs = {"a": (a, TensorProto.UINT8)} | ({} if is_weight else {"b": (b, TensorProto.UINT8)})
    node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
    agrees(
        make_model([node], inputs, {"y": (y, TensorProto.INT32)}, weights), *values[: 1 if is_weight else 2]
    )


def test_an_integer_convolution_of_groups_is_computed_in_float32(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(5)
    weights = {
        "w": random.integers(0, 255, (2, 2, 3, 3)).astype(np.uint8),
        "xz": np.uint8(7),
        "wz": np.uint8(9),
    }
    node = helper.make_node("ConvInteger", ["x", "w", "xz", "wz"], ["y"], group=2)
    types = {"x": ([1, 4, 5, 5], TensorProto.UINT8)}, {"y": ([1, 2, 3, 3], TensorProto.INT32)}
    x = random.integers(0, 255, (1, 4, 5, 5)).astype(np.uint8)
    normal = agrees(make_model([node], *types, weights), x)
    assert "ConvInteger" not in operators(normal)


def test_quantised_weights_stay_quantised(make_model: ModelMaker, noise: Any, agrees: Any) -> None:
    weights = {"w": np.arange(12, dtype=np.int8).reshape(4, 3), "s": np.float32(0.1), "z": np.int8(1)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["wf"]),
        helper.make_node("MatMul", ["x", "wf"], ["y"]),
    ]
    normal = agrees(make_model(nodes, {"x": [2, 4]}, {"y": [2, 3]}, weights), noise(2, 4))
    assert "DequantizeLinear" in operators(normal)


@pytest.mark.parametrize("zero", [False, True])
def test_a_scale_for_each_block(make_model: ModelMaker, noise: Any, run_onnx: Any, zero: bool) -> None:
    # The last block of three is shorter. The weights are large enough to stay a node.
    random = np.random.default_rng(2)
    weights: dict[str, Any] = {
        "w": random.integers(-8, 8, (8, 4)).astype(np.int8),
        "s": random.uniform(0.05, 0.2, (3, 4)).astype(np.float32),
        "xs": np.full((2, 3), 0.05, np.float32),
        "z": random.integers(-3, 3, (3, 4)).astype(np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["q"], axis=1, block_size=3),
        helper.make_node("DequantizeLinear", ["q", "xs", "xz"], ["r"], axis=1, block_size=3),
        helper.make_node(
            "DequantizeLinear", ["w", "s", *(["z"] if zero else [])], ["wf"], axis=0, block_size=3
        ),
        helper.make_node("MatMul", ["r", "wf"], ["y"]),
    ]
    weights["xz"] = np.array([[0, 1, 2]] * 2, np.int8)
    model = make_model(nodes, {"x": [2, 8]}, {"y": [2, 4]}, weights, opset=21)
    x = noise(2, 8)
    offset = np.repeat(weights["z"], 3, 0)[:8].astype(np.float32) if zero else 0
    product = (weights["w"] - offset) * np.repeat(weights["s"], 3, 0)[:8]
    wanted = np.rint(x / np.float32(0.05)) * np.float32(0.05) @ product
    imported = import_onnx(model)
    assert "QuantizeLinear" not in operators(imported.onnx)
    kept = [node.name for node in imported.onnx.graph.node if node.op_type == "DequantizeLinear"]
    assert len(kept) == 1, "the constant weights, which a kernel decodes"
    np.testing.assert_allclose(run_onnx(imported.onnx, {"x": x})[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_dynamic_quantisation_also_of_zeros(
    make_model: ModelMaker, noise: Any, agrees: Any, factor: float
) -> None:
    """ONNX's definition divides 0 by 0; ONNX Runtime takes a scale of 1."""
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], name="node")
    byte = TensorProto.UINT8
    outputs = {"q": ([2, 3], byte), "s": [], "z": ([], byte)}
    agrees(make_model([node], {"x": [2, 3]}, outputs), noise(2, 3) * np.float32(factor))
