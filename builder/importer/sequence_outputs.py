"""Outputs that are sequences of tensors become one output for each tensor.

skl2onnx writes the probabilities of a MultiOutputClassifier so, PyTorch a split. A sequence whose length is
only known at run time stays, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node
from builder.importer.rewrites.replacement import input_name
from builder.importer.rewrites.sequences import MAX_ELEMENTS


@dataclass(frozen=True, slots=True)
class Element:
    """What an output was in the model as it was given."""

    output: str
    place: int


def split_sequences(model: onnx.ModelProto) -> dict[str, Element]:
    """Replace outputs that are sequences of known length, in place.

    Result: new output, `NAME_0`, `NAME_1` ... -> what it was.
    """
    graph = model.graph
    made = {node.output[0]: node for node in graph.node if node.op_type == "SequenceConstruct"}
    lengths = (
        _lengths(OnnxGraph(model)) if any(o.type.HasField("sequence_type") for o in graph.output) else {}
    )
    taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    taken |= {name for node in graph.node for name in node.output}
    elements: dict[str, Element] = {}
    outputs: list[onnx.ValueInfoProto] = []
    for output in graph.output:
        length = lengths.get(output.name, 0)
        if not 0 < length <= MAX_ELEMENTS:
            outputs.append(output)
            continue
        kind = output.type.sequence_type.elem_type.tensor_type.elem_type
        for place in range(length):
            name = f"{output.name}_{place}"
            while name in taken:
                name += "_"
            taken.add(name)
            elements[name] = Element(output.name, place)
            if output.name in made:
                source = made[output.name].input[place]
                graph.node.append(helper.make_node("Identity", [source], [name], name=name))
            else:
                number = numpy_helper.from_array(np.array(place), f"{name}/place")
                graph.initializer.append(number)
                at = helper.make_node("SequenceAt", [output.name, number.name], [name], name=name)
                graph.node.append(at)
            outputs.append(helper.make_tensor_value_info(name, kind, None))
    if elements:
        copies = [onnx.ValueInfoProto.FromString(output.SerializeToString()) for output in outputs]
        del graph.output[:]
        graph.output.extend(copies)
        read = {name for node in graph.node for name in node.input} | {output.name for output in outputs}
        kept = [
            copy_node(node) for node in graph.node if node.output[0] in read or node.output[0] not in made
        ]
        del graph.node[:]
        graph.node.extend(kept)
    return elements


def _lengths(graph: OnnxGraph) -> dict[str, int]:
    """How many elements each sequence has, as far as that is known."""
    found: dict[str, int] = {}
    more = {"SequenceInsert": 1, "SequenceErase": -1, "Identity": 0, "SequenceMap": 0}
    for node in graph.proto.node:
        length: int | None = None
        match node.op_type:
            case "SequenceConstruct":
                length = len(node.input)
            case "SequenceEmpty":
                length = 0
            case "SplitToSequence":
                length = _parts(node, graph)
            case operator if operator in more and node.input[0] in found:
                length = found[node.input[0]] + more[operator]
        if length is not None:
            found.update(dict.fromkeys(node.output, length))
    return found


def _parts(node: onnx.NodeProto, graph: OnnxGraph) -> int | None:
    """How many parts a SplitToSequence makes; None if the file does not say."""
    name, found = input_name(node, 1), graph.type_of(node.input[0])
    sizes = graph.constant(name) if name else np.array(1)
    if sizes is None or sizes.ndim:
        return None if sizes is None else int(sizes.size)
    shape = None if found is None else found.shape
    axis = int(attributes(node).get("axis", 0))
    if shape is None or not -len(shape) <= axis < len(shape) or sizes < 1:
        return None
    extent = shape[axis]
    return None if extent is None else -(-extent // int(sizes))
