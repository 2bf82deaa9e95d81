"""Operators that are compiled as they are: trees and support vector machines of ai.onnx.ml, and suppression.

The normalised model keeps these nodes, so ONNX Runtime's own kernels are the reference. Their attributes may
be a gigabyte, and shape inference, opset conversion and TVM's front end would copy them or make Python lists
of them: those see a placeholder. Padded non-maximum suppression (`builder.importer.bounded.suppression`) is
unknown to them altogether.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import onnx
from onnx import TensorProto, helper
from tvm import relax

from builder.importer.bounded import suppression
from builder.importer.classic import ensemble, ensemble_call, svm
from builder.importer.converters import Attributes, Converter, Inputs

DOMAIN: Final = "ai.onnx.ml"
KEPT: Final = ensemble.OPERATORS | svm.OPERATORS
# A placeholder's domain and operator, and the attribute with the place of its node among the model's nodes.
PLACEHOLDER_DOMAIN: Final = "edgebundle"
PLACEHOLDER: Final = "Kept"
_PLACE: Final = "place"


def is_kept(node: onnx.NodeProto) -> bool:
    """Whether a node is compiled as it is."""
    return bool((node.domain == DOMAIN and node.op_type in KEPT) or node.domain == suppression.DOMAIN)


def placeholder(node: onnx.NodeProto, place: int) -> onnx.NodeProto:
    """Return a node with the same inputs and outputs, and `place` instead of attributes."""
    return helper.make_node(
        PLACEHOLDER, list(node.input), list(node.output), name=node.name, domain=PLACEHOLDER_DOMAIN,
        **{_PLACE: place},
    )  # fmt: skip


def with_placeholders(nodes: Sequence[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Iterate over nodes, with a placeholder instead of each kept one."""
    for place, node in enumerate(nodes):
        yield placeholder(node, place) if is_kept(node) else node


def restore(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto]) -> None:
    """Put the kept nodes back into a graph, in place, with the inputs and outputs of their placeholders.

    `graph`: a graph that was made from `nodes`.
    `nodes`: the nodes that `with_placeholders` replaced.
    """
    for node in graph.node:
        if node.domain == PLACEHOLDER_DOMAIN:
            original = nodes[node.attribute[0].i]
            inputs, outputs = list(node.input), list(node.output)
            node.CopyFrom(original)
            node.input[:], node.output[:] = inputs, outputs


def output_types(
    node: onnx.NodeProto, elem_type: int, shape: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the type and shape of each output of a kept node, for an input with a type and a static shape.

    An empty list means that its attributes are wrong.
    """
    if node.domain == suppression.DOMAIN:
        return suppression.output_types(node)
    samples = shape[0] if len(shape) > 1 else 1
    try:
        count = svm.score_count if node.op_type in svm.OPERATORS else ensemble.target_count
        columns = count(node)
    except ValueError:
        return []
    if columns < 1:
        return []
    scores = TensorProto.FLOAT
    if node.op_type == "TreeEnsemble":
        scores = elem_type
    found: list[tuple[int, tuple[int, ...]]] = [(scores, (samples, columns))]
    if node.op_type in ("TreeEnsembleClassifier", "SVMClassifier"):
        found.insert(0, (TensorProto.INT64, (samples,)))
    return found


def kept_converter(nodes: Sequence[onnx.NodeProto]) -> Converter:
    """Return the converter of the placeholders of `nodes`."""

    def convert(bb: relax.BlockBuilder, inputs: Inputs, attrs: Attributes) -> relax.Expr:
        node = nodes[int(attrs[_PLACE])]
        if node.domain == suppression.DOMAIN:
            return relax.Tuple(suppression.convert(bb, node, inputs))
        convert = svm.convert if node.op_type in svm.OPERATORS else ensemble_call.convert
        outputs = convert(bb, node, inputs[0])
        return relax.Tuple(outputs) if len(outputs) > 1 else outputs[0]

    return Converter(convert)
