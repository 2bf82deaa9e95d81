"""Constant folding: compute what does not depend on the inputs, mostly shapes.

Promises ONNX Runtime's own results, because ONNX Runtime computes them. Weights in int8 stay int8:
dequantising them here would make the bundle four times as large. A single number is dequantised: the value of
a Pad and the limits of a Clip must be numbers.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import defs, helper, numpy_helper

from builder.importer import native
from builder.importer.divisors import with_defined_quotients
from builder.importer.onnx_graph import OnnxGraph, copy_node, remove_dead_nodes, subgraphs
from builder.importer.opset import NEWEST
from builder.importer.shapes import infer_shapes
from builder.importer.silence import FOREIGN_FAILURES
from builder.importer.weights import is_large

# A constant is folded only if it is at most this much larger than what it was computed from: Expand, Tile and
# ConstantOfShape make large tensors from small ones.
MAX_GROWTH_BYTES: Final = 1 << 20
_NEVER: Final = frozenset({"DequantizeLinear", "If", "Loop", "Scan"})
_RANDOM: Final = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)


def fold_constants(model: onnx.ModelProto, *, strict: bool = True) -> None:
    """Fold constants until nothing changes, in place, and record all types and shapes.

    `strict`: whether to refuse shapes that contradict each other.
    Raises `ModelError` if `strict` is true and the model's shapes contradict each other.
    """
    # A round folds everything that is constant at its start; the shapes it reveals feed the next round. A
    # transformer needs two rounds per layer. Every round but the last removes a node, so the loop ends.
    while True:
        infer_shapes(model, strict=strict)
        folded = _fold_once(model)
        remove_dead_nodes(model.graph)
        if not folded:
            return


def _fold_once(model: onnx.ModelProto) -> int:
    graph = OnnxGraph(model)
    count = graph.rewrite(
        lambda node: (
            _shape_as_constant(graph, node) or _nothing(graph, node) or _without_empty_inputs(graph, node)
        )
    )
    constant = {tensor.name for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if all(name in constant for name in node.input if name) and _is_foldable(graph, node):
            nodes.append(node)
            constant |= set(node.output)
    if not nodes:
        return count
    values = _evaluate(graph, nodes)
    done = set(values)
    kept = {output.name for output in model.graph.output}

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        made = [name for name in node.output if name]
        if not made or not all(name in done for name in made):
            return None
        if kept & set(made):
            # An output must be made by a node: front ends do not accept a weight as an output.
            if node.op_type == "Identity" and all(graph.is_constant(name) for name in node.input):
                return None
            result = []
            for name in made:
                source = graph.add_constant(values[name], name)
                result.append(helper.make_node("Identity", [source], [name], name=node.name))
            return result
        for name in made:
            graph.set_initializer(numpy_helper.from_array(values[name], name))
        return []

    return count + graph.rewrite(replace)


def _shape_as_constant(graph: OnnxGraph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Shape and Size of a value whose shape is known."""
    if node.op_type not in ("Shape", "Size") or node.domain:
        return None
    shape = graph.shape_of(node.input[0])
    if shape is None:
        return None
    if node.op_type == "Size":
        values: NDArray[Any] = np.array(int(np.prod(shape, dtype=np.int64)), np.int64)
    else:
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        values = np.array(shape[slice(ends.get("start", 0), ends.get("end"))], np.int64)
    constant = helper.make_node(
        "Constant", [], list(node.output), name=node.name, value=numpy_helper.from_array(values)
    )
    return [constant]


def _nothing(graph: OnnxGraph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Make tensors without elements of nothing: they are the same in each request."""
    if node.domain or (node.op_type == "Identity" and graph.is_constant(node.input[0])):
        return None
    result = []
    for name in filter(None, node.output):
        found = graph.type_of(name)
        shape = None if found is None else found.static_shape
        if found is None or shape is None or 0 not in shape or found.elem_type == onnx.TensorProto.STRING:
            return None
        source = graph.add_constant(np.zeros(shape, found.dtype), f"{name}/empty")
        result.append(helper.make_node("Identity", [source], [name], name=node.name))
    return result or None


def _without_empty_inputs(graph: OnnxGraph, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
    """Read constants instead of tensors without elements, which are the same in each request."""
    changed = copy_node(node)
    for place, name in enumerate(node.input):
        found = graph.type_of(name) if name else None
        shape = None if found is None else found.static_shape
        if found is None or shape is None or 0 not in shape or graph.is_constant(name):
            continue
        if found.elem_type != onnx.TensorProto.STRING:
            changed.input[place] = graph.add_constant(np.zeros(shape, found.dtype), f"{name}/empty")
    return None if changed == node else [changed]


def _is_foldable(graph: OnnxGraph, node: onnx.NodeProto) -> bool:
    if node.op_type == "DequantizeLinear" and _is_number(graph, node.input[0]):
        return True
    if node.domain or node.op_type in _NEVER or node.op_type in _RANDOM or any(subgraphs(node)):
        return False
    if not defs.has(node.op_type, graph.opset, ""):
        return False
    if node.op_type == "Constant":
        return (
            bool(node.attribute)
            and node.attribute[0].name.startswith("value")
            and "string" not in node.attribute[0].name
        )
    growth = 0
    for name in node.output:
        if not name:
            continue
        found = graph.type_of(name)
        if found is None:
            # A sequence or an optional. Tensors of unknown size are folded: they are small in practice.
            return False
        if found.elem_type == onnx.TensorProto.STRING:
            return False
        if found.static_shape is not None:
            growth += int(np.prod(found.static_shape, dtype=np.float64)) * found.dtype.itemsize
    for name in node.input:
        shape = graph.shape_of(name)
        if shape is not None and (known := graph.type_of(name)) is not None:
            growth -= int(np.prod(shape, dtype=np.float64)) * known.dtype.itemsize
    return growth <= MAX_GROWTH_BYTES


def _is_number(graph: OnnxGraph, name: str) -> bool:
    """Whether a tensor is one number; int32 is what biases are in, which stay with their products."""
    found = graph.type_of(name)
    return (
        found is not None and found.static_shape in ((), (1,)) and found.elem_type != onnx.TensorProto.INT32
    )


def _evaluate(graph: OnnxGraph, nodes: list[onnx.NodeProto]) -> dict[str, NDArray[Any]]:
    """Values of constant nodes: computed together, or one by one if ONNX Runtime lacks a kernel for some."""
    try:
        return _run(graph, nodes, {})
    except FOREIGN_FAILURES:
        values: dict[str, NDArray[Any]] = {}
        for node in nodes:
            if not all(graph.is_constant(name) or name in values for name in node.input if name):
                continue
            try:
                values.update(_run(graph, [node], values))
            except FOREIGN_FAILURES:
                continue
        return values


def evaluate(graph: OnnxGraph, node: onnx.NodeProto) -> dict[str, NDArray[Any]]:
    """Values of the outputs of one node whose inputs are constants; empty if it cannot be folded."""
    if not all(graph.is_constant(name) for name in node.input if name) or not _is_foldable(graph, node):
        return {}
    return _evaluate(graph, [node])


def _run(
    graph: OnnxGraph, nodes: list[onnx.NodeProto], known: dict[str, NDArray[Any]]
) -> dict[str, NDArray[Any]]:
    made = [name for node in nodes for name in node.output if name]
    needed = {name for node in nodes for name in node.input if name} - set(made)
    tensors = [tensor for tensor in graph.proto.initializer if tensor.name in needed]
    # Large weights are fed as inputs to keep the model's message small.
    fed = {t.name: np.asarray(numpy_helper.to_array(t)) for t in tensors if is_large(t)}
    fed |= {name: known[name] for name in needed if name in known}
    small = [tensor for tensor in tensors if tensor.name not in fed]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), list(value.shape))
        for name, value in fed.items()
    ]
    outputs = [onnx.ValueInfoProto(name=name) for name in made]
    body = helper.make_graph(
        [copy_node(node) for node in nodes], "constants", inputs, outputs, initializer=small
    )
    opset = [helper.make_opsetid("", min(graph.opset, NEWEST))]
    model = helper.make_model(body, opset_imports=opset, ir_version=graph.model.ir_version)
    return native.evaluate(with_defined_quotients(model), made, fed)
