"""How many multiply-adds the nodes of a model have: the measure of its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import onnx

from builder.importer.onnx_graph import OnnxGraph, attributes


def multiply_adds(model: onnx.ModelProto) -> int:
    """The multiply-adds of a model: convolutions, matrix products and recurrent layers."""
    graph = OnnxGraph(model)
    return sum(multiply_adds_of(node, graph) for node in model.graph.node)


def multiply_adds_of(node: onnx.NodeProto, graph: OnnxGraph) -> int:
    """The multiply-adds of a node; 0 for other operators, and if shapes are not known."""
    if node.domain:
        return 0
    shapes = [graph.shape_of(name) or () for name in node.input]
    out = graph.shape_of(node.output[0]) if node.output else None
    count: Callable[..., int] = _MACS.get(node.op_type, lambda *_: 0)
    try:
        return count(node, shapes, out or ())
    except IndexError:  # shapes that are not known
        return 0


def _conv_macs(_: onnx.NodeProto, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> int:
    return int(np.prod(out, dtype=np.int64) * np.prod(shapes[1][1:], dtype=np.int64))


def _transposed_macs(_: onnx.NodeProto, shapes: list[tuple[int, ...]], __: tuple[int, ...]) -> int:
    return int(np.prod(shapes[0], dtype=np.int64) * np.prod(shapes[1][1:], dtype=np.int64))


def _matmul_macs(node: onnx.NodeProto, shapes: list[tuple[int, ...]], out: tuple[int, ...]) -> int:
    depth = shapes[0][0] if attributes(node).get("transA", 0) else shapes[0][-1]
    return int(np.prod(out, dtype=np.int64) * depth)


def _recurrent_macs(_: onnx.NodeProto, shapes: list[tuple[int, ...]], __: tuple[int, ...]) -> int:
    steps, batch = shapes[0][:2]
    return int(steps * batch * (np.prod(shapes[1], dtype=np.int64) + np.prod(shapes[2], dtype=np.int64)))


_MACS: Final[Mapping[str, Callable[[onnx.NodeProto, list[tuple[int, ...]], tuple[int, ...]], int]]] = {
    "Conv": _conv_macs,
    "ConvInteger": _conv_macs,
    "ConvTranspose": _transposed_macs,
    "Gemm": _matmul_macs,
    "MatMul": _matmul_macs,
    "MatMulInteger": _matmul_macs,
    "LSTM": _recurrent_macs,
    "GRU": _recurrent_macs,
    "RNN": _recurrent_macs,
}
