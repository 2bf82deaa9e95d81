"""Normalisations that the front end lacks."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement


def lp_normalization(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """LpNormalization: x divided by its norm along an axis, 0 where the norm is 0."""
    options = attributes(node)
    found = graph.type_of(node.input[0])
    if found is None or found.shape is None:
        return None
    axis = int(options.get("axis", -1))
    new = Replacement(node, graph)
    norm = new.reduce("ReduceL1" if options.get("p", 2) == 1 else "ReduceL2", node.input[0], [axis], keep=True)
    zero = new.constant(0, found.dtype)
    safe = new.op("Where", new.op("Equal", norm, zero), new.constant(1, found.dtype), norm)
    new.op("Div", node.input[0], safe, to=node.output[0])
    return new.nodes
