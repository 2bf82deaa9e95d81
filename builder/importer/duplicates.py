"""Merges nodes that compute the same value, and small weights that are the same.

Promises that values keep their bits: 0 and -0 are different weights, and a missing input is not the next one.
onnxslim's own pass compares numbers and leaves out missing inputs, so that it takes `Clip(x, 0)` for
`Clip(x, , 0)`.
"""

from __future__ import annotations

from typing import Final

import onnx

from builder.importer.onnx_graph import subgraphs
from builder.importer.weights import is_large

_RANDOM: Final = ("Random", "Multinomial", "Bernoulli", "Dropout")


def merge_duplicates(model: onnx.ModelProto) -> None:
    """Merge what is computed or stored twice, in place; nodes must be sorted.

    A model with subgraphs stays as it is: they read values by name.
    """
    graph = model.graph
    if any(any(subgraphs(node)) for node in graph.node):
        return
    kept = {output.name for output in graph.output}
    names: dict[str, str] = {}  # a duplicate's name -> the name that stays
    seen: dict[bytes, str] = {}
    weights = []
    for tensor in graph.initializer:
        first = tensor.name
        if not is_large(tensor):
            content = onnx.TensorProto()
            content.CopyFrom(tensor)
            content.ClearField("name")
            content.ClearField("doc_string")
            first = seen.setdefault(content.SerializeToString(deterministic=True), tensor.name)
        if first == tensor.name or tensor.name in kept:
            weights.append(tensor)
        else:
            names[tensor.name] = first
    nodes = []
    computed: dict[tuple[object, ...], onnx.NodeProto] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        twin = None if node.op_type.startswith(_RANDOM) else computed.setdefault(_key(node), node)
        if twin is None or twin is node or kept.intersection(node.output):
            nodes.append(node)
        else:
            names.update(zip(node.output, twin.output, strict=True))
    del graph.initializer[:]
    graph.initializer.extend(weights)
    del graph.node[:]
    graph.node.extend(nodes)


def _key(node: onnx.NodeProto) -> tuple[object, ...]:
    """Return what makes two nodes equal: everything but the names of the node and its outputs."""
    inputs = list(node.input)
    while inputs and not inputs[-1]:
        inputs.pop()
    attributes = sorted(each.SerializeToString(deterministic=True) for each in node.attribute)
    return (node.domain, node.op_type, *inputs, None, *attributes, *map(bool, node.output))
