"""Models of a single operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx
from onnx import TensorProto, helper

ModelMaker = Callable[..., onnx.ModelProto]
# A node, its weights, and the shape of the output `y` (with its type unless that is FLOAT).
Case = tuple[onnx.NodeProto, dict[str, Any], Any]
INT64, BOOL = TensorProto.INT64, TensorProto.BOOL


def operators(model: onnx.ModelProto) -> set[str]:
    return {node.op_type for node in model.graph.node}


def one(op: str, inputs: Sequence[str], outputs: Sequence[str] = ("y",), **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name="node", **attributes)


def check_case(
    make_model: ModelMaker,
    noise: Any,
    agrees: Any,
    node: onnx.NodeProto,
    weights: dict[str, Any],
    output: Any,
) -> None:
    """Import a model of only this node, and compare it with the original; `x`, `z` and `r` are its inputs."""
    used = {"x": (2, 3, 4), "z": (2, 3, 2), "r": (2, 5 if node.op_type == "STFT" else 4, 1)}
    inputs = {name: list(used[name]) for name in dict.fromkeys(node.input) if name in used}
    agrees(make_model([node], inputs, {"y": output}, weights), *(noise(*used[name]) for name in inputs))
