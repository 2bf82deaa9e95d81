"""Weights in types that no kernel takes: 8-bit and 4-bit floats become float32, 4-bit integers become bytes.

Promises the values of ONNX's DequantizeLinear and Cast. Leaves all other uses of these types as they are:
they are folded, or refused by name.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, attributes, remove_dead_nodes
from builder.importer.rewrites.replacement import input_name

_FLOATS: Final = frozenset(
    getattr(TensorProto, name)
    for name in ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "FLOAT4E2M1")
    if hasattr(TensorProto, name)
)
_INTEGERS: Final = {
    getattr(TensorProto, name): dtype
    for name, dtype in (("INT4", np.int8), ("UINT4", np.uint8), ("INT2", np.int8), ("UINT2", np.uint8))
    if hasattr(TensorProto, name)
}
NARROW: Final = _FLOATS.union(_INTEGERS)


def widen_narrow_weights(model: onnx.ModelProto) -> None:
    """Widen the narrow weights that only DequantizeLinear reads, in place."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    graph = OnnxGraph(model)
    for tensor in model.graph.initializer:
        known = all(node.op_type == "DequantizeLinear" for node in readers.get(tensor.name, []))
        if tensor.data_type in _INTEGERS and known:
            value = numpy_helper.to_array(tensor).astype(_INTEGERS[tensor.data_type])
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        found = graph.type_of(node.input[0]) if node.input else None
        if found is None or found.elem_type not in _FLOATS or node.domain:
            return None
        value = None
        if node.op_type == "DequantizeLinear":
            value = _dequantised(node, graph)
        elif node.op_type == "Cast" and attributes(node)["to"] == TensorProto.FLOAT:
            narrow = graph.constant(node.input[0])
            value = None if narrow is None else narrow.astype(np.float32)
        if value is None:
            return None
        source = graph.add_constant(value, node.input[0])
        return [helper.make_node("Identity", [source], list(node.output), name=node.name)]

    if graph.rewrite(replace):
        remove_dead_nodes(model.graph)


def _dequantised(node: onnx.NodeProto, graph: OnnxGraph) -> NDArray[Any] | None:
    """(x - zero) * scale of constants; None if an input is not constant, or the shapes do not fit."""
    options = attributes(node)
    x, scale = graph.constant(node.input[0]), graph.constant(node.input[1])
    zero = graph.constant(name) if (name := input_name(node, 2)) else np.zeros((), np.float32)
    if x is None or scale is None or zero is None:
        return None
    axis, block = int(options.get("axis", 1)), int(options.get("block_size", 0))
    wide = x.astype(np.float32)

    def spread(part: NDArray[Any]) -> NDArray[Any]:
        part = part.astype(np.float32)
        if part.ndim == 0 or part.size == 1:
            return part.reshape(())
        if block:
            return np.take(np.repeat(part, block, axis), np.arange(wide.shape[axis]), axis)
        form = [1] * wide.ndim
        form[axis] = -1
        return part.reshape(form)

    try:
        return np.asarray((wide - spread(zero)) * spread(scale)).astype(scale.dtype)
    except (ValueError, IndexError):
        return None
