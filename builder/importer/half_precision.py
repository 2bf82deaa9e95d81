"""Widen float16 and bfloat16 to float32: the kernels compute in float32.

Promises the results of the half-precision model without the rounding of its intermediate values. Constants
keep the value that they have in half precision. float16 inputs and outputs keep their type, with a Cast at
the edge. What overflows in half precision (beyond 65504 in float16) does not overflow here.

A Cast to float16 still rounds if nothing computes with its result, because all that read it are Casts again.
A Cast to bfloat16 never does: TVM's lowering of bfloat16 drops its rounding. Such Casts are named in a note.

Leaves Casts from float32 to float32, of which it makes many, to the rewrite of Cast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer.control_flow import rename
from builder.importer.double_islands import narrow_double_islands
from builder.importer.large_models import MAX_WEIGHT_BYTES, model_bytes
from builder.importer.model_file import tensors
from builder.importer.onnx_graph import (
    OnnxGraph,
    constant_node_value,
    copy_node,
    describe,
    subgraphs,
    walk_nodes,
)

HALVES: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})
# Attributes that hold an element type, of all operators of ONNX's own domain.
TYPE_ATTRIBUTES: Final = frozenset(
    {"dtype", "output_datatype", "output_dtype", "precision", "softmax_precision", "stash_type", "to"}
)
# BitCast reads a number's bits, so its types must stay; it is folded, or refused by name.
_BY_BITS: Final = frozenset({"BitCast"})
# Operators that move numbers without computing with them.
_MOVING: Final = frozenset({"Cast", "Constant", "Identity"})

# Weights, and nodes that make constants, by name.
Constants: TypeAlias = Mapping[str, TensorProto | onnx.NodeProto]


def widen_halves(model: onnx.ModelProto, progress: Callable[[str], None]) -> None:
    """Replace float16 and bfloat16 by float32, in place, everywhere but in float16 inputs and outputs.

    bfloat16 inputs and outputs become float32: neither the Open Inference Protocol nor NumPy has bfloat16.

    `model`: the model, with inferred types, without functions. The types of values inside it are forgotten.
    Raises `ModelError` if the weights do not fit into one file as float32.
    """
    found = half_types(model)
    if not found:
        return
    _check_size(model)
    narrow_double_islands(model)
    graph = OnnxGraph(model)
    names = " and ".join(sorted(TensorProto.DataType.Name(kind).lower() for kind in found))
    if note := _note(graph, names):
        progress(note)
    rounding = _rounding_casts(graph)
    left_out = [node for node in rounding if _cast_to_half(node) == TensorProto.BFLOAT16]
    if left_out:
        progress(f"casts to bfloat16 that only round are left out: {describe(left_out)}")
    for value, role in _interface(model):
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            progress(f"{role} '{value.name}': bfloat16 becomes float32, which holds all of its values")
    rounded = {node.output[0] for node in rounding} - {node.output[0] for node in left_out}
    _Widening(rounded, graph.fresh).graph(model.graph, {})
    del model.graph.value_info[:]
    _cast_at_edges(model.graph, graph.fresh)


def _interface(model: onnx.ModelProto) -> Iterator[tuple[onnx.ValueInfoProto, str]]:
    yield from ((value, "input") for value in model.graph.input)
    yield from ((value, "output") for value in model.graph.output)


def half_types(model: onnx.ModelProto) -> set[int]:
    """The half-precision types of a model's interface, weights, attributes and values."""
    kinds = {value.type.tensor_type.elem_type for value, _ in _interface(model)}
    kinds |= {value.type.tensor_type.elem_type for value in model.graph.value_info}
    kinds |= {tensor.data_type for tensor in tensors(model)}
    for node in walk_nodes(model.graph):
        kinds |= {a.i for a in node.attribute if a.name in TYPE_ATTRIBUTES and not node.domain}
    return kinds & HALVES


def _check_size(model: onnx.ModelProto) -> None:
    halves = [tensor for tensor in model.graph.initializer if tensor.data_type in HALVES]
    grown = model_bytes(model) + sum(2 * _count(tensor) for tensor in halves)
    if grown > MAX_WEIGHT_BYTES:
        raise ModelError(
            f"expected a model of at most {MAX_WEIGHT_BYTES} bytes when its weights are float32, got {grown}",
            hint="quantise or prune the model: half-precision weights are imported as float32",
        )


def _count(tensor: TensorProto) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))


def _note(graph: OnnxGraph, names: str) -> str:
    """What became float32, for the user; empty if the model only casts."""
    made = (name for node in walk_nodes(graph.proto) if node.op_type not in _MOVING for name in node.output)
    computes = any(_is_half(graph, name) for name in made)
    stored = 2 * sum(_count(tensor) for tensor in graph.proto.initializer if tensor.data_type in HALVES)
    sizes = f": {stored / 1e6:.1f} MB become {2 * stored / 1e6:.1f} MB in memory" if stored > 1e5 else ""
    if computes:
        return f"computed in float32: the model is in {names}" + (f"; its weights{sizes}" if sizes else "")
    return f"computed in float32: weights in {names}{sizes}" if stored else ""


def _is_half(graph: OnnxGraph, name: str) -> bool:
    found = graph.type_of(name)
    return found is not None and found.elem_type in HALVES


def _rounding_casts(graph: OnnxGraph) -> list[onnx.NodeProto]:
    """Casts of wider numbers to half precision that only round: all that read their results are Casts."""
    read: Counter[str] = Counter()
    cast: Counter[str] = Counter()
    for node in walk_nodes(graph.proto):
        read.update(node.input)
        if node.op_type == "Cast":
            cast.update(node.input)
        for subgraph in subgraphs(node):
            read.update(output.name for output in subgraph.output)
    return [
        node
        for node in walk_nodes(graph.proto)
        if _cast_to_half(node) is not None
        and 0 < cast[node.output[0]] == read[node.output[0]]
        and not _is_half(graph, node.input[0])
        and not graph.is_constant(node.input[0])
    ]


class _Widening:
    """One pass over a graph and its subgraphs.

    `rounded`: names of half-precision values that stay rounded.
    """

    def __init__(self, rounded: set[str], fresh: Callable[[str], str]) -> None:
        self._rounded = rounded
        self._fresh = fresh

    def graph(self, graph: onnx.GraphProto, outer: Constants) -> None:
        """Widen the nodes and weights of a graph, and its subgraphs with all their values."""
        constants = {**outer, **{tensor.name: tensor for tensor in graph.initializer}}
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type == "Constant" and not node.domain:
                constants[node.output[0]] = node
            for subgraph in subgraphs(node):
                self.graph(subgraph, constants)
                for value in (*subgraph.input, *subgraph.output, *subgraph.value_info):
                    _widen_type(value.type)
            nodes += self._node(node, constants)
        kept = [copy_node(node) for node in nodes]
        del graph.node[:]
        graph.node.extend(kept)
        for tensor in graph.initializer:
            _widen_tensor(tensor)

    def _node(self, node: onnx.NodeProto, constants: Constants) -> list[onnx.NodeProto]:
        kind = _cast_to_half(node)
        if kind is not None:
            source = constants.get(node.input[0])
            if source is not None and (value := _rounded(source, kind)) is not None:
                tensor = numpy_helper.from_array(value)
                return [helper.make_node("Constant", [], list(node.output), name=node.name, value=tensor)]
            if node.output[0] in self._rounded:
                name = self._fresh(node.output[0])
                half = helper.make_node("Cast", list(node.input), [name], name=f"{node.name}/half", to=kind)
                return [half, _cast(name, node.output[0], TensorProto.FLOAT)]
        _widen_attributes(node)
        return [node]


def _cast_to_half(node: onnx.NodeProto) -> int | None:
    if node.op_type != "Cast" or node.domain:
        return None
    return next((a.i for a in node.attribute if a.name == "to" and a.i in HALVES), None)


def _rounded(source: TensorProto | onnx.NodeProto, kind: int) -> NDArray[np.float32] | None:
    """A constant that a Cast rounds to half precision, as float32; None if rounding does not change it."""
    value = numpy_helper.to_array(source) if isinstance(source, TensorProto) else constant_node_value(source)
    if value is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        # From the constant's own type, because rounding to float32 first may round a second time.
        rounded = np.asarray(value.astype(helper.tensor_dtype_to_np_dtype(kind)).astype(np.float32))
    return None if np.array_equal(rounded, value.astype(np.float64), equal_nan=True) else rounded


def _widen_attributes(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        match attribute.type:
            case AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            case AttributeProto.TENSORS:
                for tensor in attribute.tensors:
                    _widen_tensor(tensor)
            case AttributeProto.SPARSE_TENSOR:
                _widen_tensor(attribute.sparse_tensor.values)
            case AttributeProto.TYPE_PROTO:
                _widen_type(attribute.tp)
            case AttributeProto.INT if _is_half_type(node, attribute):
                attribute.i = TensorProto.FLOAT


def _is_half_type(node: onnx.NodeProto, attribute: AttributeProto) -> bool:
    return (
        attribute.name in TYPE_ATTRIBUTES
        and attribute.i in HALVES
        and not node.domain
        and node.op_type not in _BY_BITS
    )


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in HALVES:
        value = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def _widen_type(kind: onnx.TypeProto) -> None:
    match kind.WhichOneof("value"):
        case "tensor_type":
            if kind.tensor_type.elem_type in HALVES:
                kind.tensor_type.elem_type = TensorProto.FLOAT
        case "sequence_type":
            _widen_type(kind.sequence_type.elem_type)
        case "optional_type":
            _widen_type(kind.optional_type.elem_type)


def _cast_at_edges(graph: onnx.GraphProto, fresh: Callable[[str], str]) -> None:
    """Give what the graph reads as float16 inputs and makes as float16 outputs new names, and cast."""
    inputs = {value.name: fresh(value.name) for value in graph.input if _is_float16(value)}
    # An input may also be an output: then nothing computes it.
    taken = {value.name for value in graph.input}
    outputs = {
        value.name: fresh(value.name)
        for value in graph.output
        if _is_float16(value) and value.name not in taken
    }
    if not inputs and not outputs:
        return
    names = {**inputs, **outputs}
    for node in graph.node:
        rename(node, names)
    for tensor in graph.initializer:
        tensor.name = outputs.get(tensor.name, tensor.name)
    first = [_cast(name, wide, TensorProto.FLOAT) for name, wide in inputs.items()]
    nodes = [copy_node(node) for node in graph.node]
    last = [_cast(wide, name, TensorProto.FLOAT16) for name, wide in outputs.items()]
    del graph.node[:]
    graph.node.extend([*first, *nodes, *last])


def _is_float16(value: onnx.ValueInfoProto) -> bool:
    return bool(value.type.tensor_type.elem_type == TensorProto.FLOAT16)


def _cast(source: str, target: str, kind: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"{source}/cast", to=kind)
