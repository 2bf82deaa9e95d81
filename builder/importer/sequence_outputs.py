"""Outputs that are sequences of tensors become one output for each tensor.

skl2onnx writes the probabilities of a MultiOutputClassifier so. A sequence whose length is only known at run
time stays, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper

from builder.importer.onnx_graph import copy_node


@dataclass(frozen=True, slots=True)
class Element:
    """What an output was in the model as it was given.

    Attributes
    ----------
    output
        The output that is a sequence.
    place
        Its place there.
    """

    output: str
    place: int


def split_sequences(model: onnx.ModelProto) -> dict[str, Element]:
    """Replace outputs that are sequences of known length, in place.

    Returns
    -------
    dict
        New output, `NAME_0`, `NAME_1` ... -> what it was.
    """
    graph = model.graph
    made = {node.output[0]: node for node in graph.node if node.op_type == "SequenceConstruct"}
    taken = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    taken |= {name for node in graph.node for name in node.output}
    elements: dict[str, Element] = {}
    outputs: list[onnx.ValueInfoProto] = []
    for output in graph.output:
        node = made.get(output.name)
        if node is None:
            outputs.append(output)
            continue
        kind = output.type.sequence_type.elem_type.tensor_type.elem_type
        for place, source in enumerate(node.input):
            name = f"{output.name}_{place}"
            while name in taken:
                name += "_"
            taken.add(name)
            elements[name] = Element(output.name, place)
            graph.node.append(helper.make_node("Identity", [source], [name], name=name))
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
