"""Resolve sequences of known length: each element becomes a separate tensor.

PyTorch's exporters use sequences for `torch.split`, `torch.stack` and lists of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.importer.control_flow import inline_body
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.loops import MAX_UNROLLED_NODES
from builder.importer.rewrites.replacement import Replacement, constant_integer, input_name

# A longer sequence is data, not part of the model's structure.
MAX_ELEMENTS: Final = 1024

_Sequences = dict[str, list[str]]


def resolve_sequences(graph: OnnxGraph) -> int:
    """Replace sequence operators by operators on their elements, in place.

    Result: how many nodes were replaced. Nodes with unknown positions or lengths stay.
    """
    known: _Sequences = {}

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        handler = None if node.domain else _HANDLERS.get(node.op_type)
        return handler(node, graph, known) if handler else None

    def drop(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        # A node that makes a sequence can only be dropped when the sequence is no longer read.
        made = any(name in known for name in node.output)
        return [] if made and not any(name in needed for name in node.output) else None

    count = graph.rewrite(replace)
    needed = {name for node in graph.proto.node for name in node.input if name not in known}
    needed |= {output.name for output in graph.proto.output}
    readers = {
        name
        for node in graph.proto.node
        if not any(out in known for out in node.output)
        for name in node.input
    }
    needed |= readers
    return count + graph.rewrite(drop)


def _construct(node: onnx.NodeProto, _: OnnxGraph, known: _Sequences) -> None:
    known[node.output[0]] = list(node.input)


def _empty(node: onnx.NodeProto, _: OnnxGraph, known: _Sequences) -> None:
    known[node.output[0]] = []


def _identity(node: onnx.NodeProto, _: OnnxGraph, known: _Sequences) -> None:
    if node.input[0] in known:
        known[node.output[0]] = known[node.input[0]]


def _insert(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> None:
    if node.input[0] not in known:
        return
    elements = list(known[node.input[0]])
    position = constant_integer(node, graph, 2, len(elements))
    if position is not None and len(elements) < MAX_ELEMENTS:
        elements.insert(position, node.input[1])
        known[node.output[0]] = elements


def _map(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> list[onnx.NodeProto] | None:
    """SequenceMap: the nodes of its body, once for each element."""
    body: onnx.GraphProto = attributes(node)["body"]
    count = len(known.get(node.input[0], ()))
    lists = [known[name] if name in known else [name] * count for name in node.input]
    if not 0 < count * len(body.node) <= MAX_UNROLLED_NODES or any(len(each) != count for each in lists):
        return None
    others = [name for name in node.input if name not in known and graph.type_of(name) is None]
    makers = [graph.maker_of(name) for name in others]
    if any(maker is not None and maker.op_type in _MAY_MAKE_SEQUENCES for maker in makers):
        return None  # perhaps a sequence whose elements are not known yet
    new: list[onnx.NodeProto] = []
    made: list[list[str]] = [[] for _ in body.output]
    for step, arguments in enumerate(zip(*lists, strict=True)):
        outputs = [graph.fresh(output.name) for output in body.output]
        new += inline_body(graph, body, f"{node.name}/{step}", list(arguments), outputs)
        for elements, output in zip(made, outputs, strict=True):
            elements.append(output)
    known.update(zip(node.output, made, strict=False))
    return new


def _erase(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> None:
    if node.input[0] not in known:
        return
    elements = list(known[node.input[0]])
    position = constant_integer(node, graph, 1, -1)
    if position is not None and -len(elements) <= position < len(elements):
        del elements[position]
        known[node.output[0]] = elements


def _split(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> list[onnx.NodeProto] | None:
    shape = graph.shape_of(node.input[0])
    options = attributes(node)
    axis = int(options.get("axis", 0))
    if shape is None or not -len(shape) <= axis < len(shape):
        return None
    extent = shape[axis]
    sizes = [1] * extent
    squeeze = not options.get("keepdims", 1)
    if name := input_name(node, 1):
        value = graph.constant(name)
        if value is None:
            return None
        squeeze = False
        if value.ndim == 0:
            step = int(value)
            sizes = [min(step, extent - start) for start in range(0, extent, step)] if step > 0 else []
        else:
            sizes = [int(size) for size in value]
    if not 0 < len(sizes) <= MAX_ELEMENTS or sum(sizes) != extent:
        return None
    new = Replacement(node, graph)
    elements = new.op_many("Split", len(sizes), node.input[0], new.ints(*sizes), axis=axis)
    if squeeze:
        elements = [new.op("Squeeze", element, new.ints(axis)) for element in elements]
    known[node.output[0]] = elements
    return new.nodes


def _at(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> list[onnx.NodeProto] | None:
    elements = known.get(node.input[0])
    position = constant_integer(node, graph, 1, None)
    if elements is None or position is None or not -len(elements) <= position < len(elements):
        return None
    return [helper.make_node("Identity", [elements[position]], list(node.output), name=node.name)]


def _length(node: onnx.NodeProto, _: OnnxGraph, known: _Sequences) -> list[onnx.NodeProto] | None:
    if node.input[0] not in known:
        return None
    value = numpy_helper.from_array(np.array(len(known[node.input[0]]), np.int64))
    return [helper.make_node("Constant", [], list(node.output), name=node.name, value=value)]


def _concat(node: onnx.NodeProto, graph: OnnxGraph, known: _Sequences) -> list[onnx.NodeProto] | None:
    elements = known.get(node.input[0])
    options = attributes(node)
    axis = int(options["axis"])
    if not elements:
        return None
    new = Replacement(node, graph)
    if options.get("new_axis", 0):
        elements = [new.op("Unsqueeze", element, new.ints(axis)) for element in elements]
    new.op("Concat", *elements, to=node.output[0], axis=axis)
    return new.nodes


_Handler = Callable[[onnx.NodeProto, OnnxGraph, _Sequences], "list[onnx.NodeProto] | None"]
_HANDLERS: Final[Mapping[str, _Handler]] = {
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceMap": _map,
    "Identity": _identity,
    "SplitToSequence": _split,
    "SequenceAt": _at,
    "SequenceLength": _length,
    "ConcatFromSequence": _concat,
}
_MAKE_TENSORS: Final = frozenset({"ConcatFromSequence", "SequenceAt", "SequenceLength"})
_MAY_MAKE_SEQUENCES: Final = frozenset(
    {*_HANDLERS, "If", "Loop", "OptionalGetElement", "Scan"} - _MAKE_TENSORS
)
