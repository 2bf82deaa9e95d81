"""Check that nodes name axes that their tensors have: ONNX's inference leaves out some operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import onnx

from builder.errors import ModelError
from builder.importer.onnx_graph import DEFAULT_DOMAINS, OnnxGraph, attributes, describe

# Operators with an axis of their first input as an attribute, and the place of the input that others have.
_ATTRIBUTES: Final = frozenset(
    {"ArgMax", "ArgMin", "Compress", "DFT", "Gather", "GatherElements", "Hardmax", "LogSoftmax",
     "LpNormalization", "Scatter", "ScatterElements", "Softmax", "TopK"}
)  # fmt: skip
_INPUTS: Final = {"CumProd": 1, "CumSum": 1, "DFT": 2, "Pad": 3, "Slice": 3}
# Before opset 13, these take the axis behind the last, too.
_TO_THE_END: Final = frozenset({"Hardmax", "LogSoftmax", "Softmax"})
_REDUCTION: Final = "Reduce"


def check_axes(model: onnx.ModelProto) -> None:
    """Check the axes of nodes whose first input's shape is known.

    Raises `ModelError` if a tensor does not have an axis that a node names.
    """
    graph = OnnxGraph(model)
    for node in model.graph.node:
        shape = graph.shape_of(node.input[0]) if node.input and node.domain in DEFAULT_DOMAINS else None
        if shape is None:
            continue
        rank = max(len(shape), 1)  # PyTorch's exporter writes axis 0 of scalars
        last = rank - (node.op_type not in _TO_THE_END)
        for axis in _axes(node, graph):
            if not -rank <= axis <= last:
                raise ModelError(
                    f"{describe([node])}: expected an axis from {-rank} to {rank - 1} of a tensor of "
                    f"{len(shape)} dimensions, got {axis}",
                    hint="export the model again: it names an axis that its tensor does not have",
                )


def _axes(node: onnx.NodeProto, graph: OnnxGraph) -> Iterator[int]:
    options = attributes(node)
    is_reduction = node.op_type.startswith(_REDUCTION)
    if node.op_type in _ATTRIBUTES and "axis" in options:
        yield int(options["axis"])
    if is_reduction:
        yield from map(int, options.get("axes", ()))
    place = 1 if is_reduction else _INPUTS.get(node.op_type)
    if place is not None and len(node.input) > place and node.input[place]:
        value = graph.constant(node.input[place])
        if value is not None and value.dtype.kind == "i":
            yield from map(int, value.ravel())
