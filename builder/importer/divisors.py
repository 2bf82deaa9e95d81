"""Integer quotients in ONNX Runtime that cannot end the process.

ONNX does not define the quotient of an integer by zero, nor that of the least integer by -1; ONNX Runtime
leaves both to the processor, which may answer with a signal. Our kernels (`builder.kernels.spaces.division`)
define them: a quotient by zero is 0, the least integer by -1 is itself, and the remainder of both is 0, as in
NumPy. What is given to ONNX Runtime gets the same definition here. Leaves quotients of real numbers as they
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.calls.divisors import is_harmless
from builder.importer.onnx_graph import constant_node_value, copy_node, subgraphs, value_type
from builder.importer.shapes import infer_shapes
from builder.importer.weights import without_large_weights

_QUOTIENTS: Final = frozenset({"Div", "Mod"})
_INTEGERS: Final = frozenset(
    {
        *(TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64),
        *(TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64),
    }
)

_LEAST: Final = int(np.iinfo(np.int64).min)

Types = Mapping[str, int]


def with_defined_quotients(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with the same results in which every quotient of integers is defined.

    `model`: the model; it stays as it is, and is returned if all of its quotients are defined.
    """
    known = _types(model.graph)
    doubtful = [node.input[1] for node in _doubtful(model.graph, known)]
    if any(name not in known for name in doubtful):
        shell = without_large_weights(model)
        infer_shapes(shell, strict=False)
        known = _types(shell.graph) | known
    if not any(known.get(name) in _INTEGERS for name in doubtful):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    _define(changed.graph, known)
    return changed


def _types(graph: onnx.GraphProto) -> dict[str, int]:
    """Element types by name in a graph and in all graphs in it."""
    infos = (*graph.value_info, *graph.input, *graph.output)
    known = {info.name: found.elem_type for info in infos if (found := value_type(info)) is not None}
    known |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        for inner in subgraphs(node):
            known |= _types(inner)
    return known


def _doubtful(graph: onnx.GraphProto, types: Types) -> Iterator[onnx.NodeProto]:
    """Yield the quotients in a graph, and in graphs in it, that may not be defined for integers."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    constants = {node.output[0]: node for node in graph.node if node.op_type == "Constant"}
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _doubtful(inner, types)
        if node.op_type not in _QUOTIENTS or node.domain or len(node.input) != 2:
            continue
        name = node.input[1]
        if types.get(name, TensorProto.INT64) not in _INTEGERS:
            continue
        value = None
        if name in weights:
            if weights[name].data_type not in _INTEGERS:
                continue
            value = np.asarray(numpy_helper.to_array(weights[name]))
        elif name in constants and constants[name].attribute:
            value = constant_node_value(constants[name])
            if value is not None and value.dtype.kind not in "iu":
                continue
        if value is None or not is_harmless(value):
            yield node


def _define(graph: onnx.GraphProto, types: Types) -> None:
    """Define the quotients of a graph and of graphs in it, in place."""
    doubtful = {node.output[0] for node in _doubtful(graph, types) if types.get(node.input[1]) in _INTEGERS}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in subgraphs(node):
            _define(inner, types)
        nodes += (
            _defined(node, types[node.input[1]]) if doubtful.intersection(node.output) else [copy_node(node)]
        )
    del graph.node[:]
    graph.node.extend(nodes)


def _defined(node: onnx.NodeProto, elem_type: int) -> list[onnx.NodeProto]:
    """Return nodes that compute a quotient, or a remainder, that is defined for all integers.

    They compute with INT64, in which the least number of a narrower type has a quotient by -1, and which
    ONNX Runtime takes in all opsets.
    """
    new: list[onnx.NodeProto] = []

    def op(op_type: str, *inputs: str, to: str = "") -> str:
        name = to or f"{node.output[0]}/defined_{len(new)}"
        new.append(helper.make_node(op_type, list(inputs), [name], name=name))
        return name

    def cast(x: str, elem_type: int, to: str = "") -> str:
        name = op("Cast", x, to=to)
        new[-1].attribute.append(helper.make_attribute("to", elem_type))
        return name

    def number(value: int) -> str:
        name = op("Constant")
        new[-1].attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.array(value))))
        return name

    wide = TensorProto.UINT64 if elem_type == TensorProto.UINT64 else TensorProto.INT64
    a, b = node.input if elem_type == wide else (cast(each, wide) for each in node.input)
    some = cast(b, TensorProto.BOOL)
    divisor = op("Add", b, cast(op("Not", some), wide))  # 1 in place of 0
    if elem_type == TensorProto.INT64:
        beyond = op("And", op("Equal", a, number(_LEAST)), op("Equal", b, number(-1)))
        divisor = op("Add", divisor, op("Mul", cast(beyond, wide), number(2)))  # 1 in place of -1
    new.append(copy_node(node))
    new[-1].input[:] = [a, divisor]
    result = new[-1].output[0] = f"{node.output[0]}/defined"
    if node.op_type == "Div":
        result = op("Mul", result, cast(some, wide))
    cast(result, elem_type, to=node.output[0])
    return new
