"""Whether a model takes NaN for a missing value.

Promises no for every operator that would compute with it: most carry a NaN on to the answer, and a few, such
as a comparison or ReLU, turn it into a number without a word. Yes if each way from the input ends at trees
that say where a missing value goes, or at a test for NaN that replaces it.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from builder.importer.classic import ensemble
from builder.importer.classic.kept import is_kept

# These only move values, or do the same to each value, so a NaN stays one in its place.
_MOVES: Final = frozenset(
    {"Concat", "Expand", "Flatten", "Floor", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
     "Transpose", "Unsqueeze"}
)  # fmt: skip
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.DOUBLE)


def takes_nan(model: onnx.ModelProto, name: str) -> bool:
    """Return whether NaN in an input is a missing value to a model."""
    absent = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "IsNaN"}
    carriers, ends = {name}, 0
    for node in model.graph.node:  # sorted, so makers come first
        read = [value for value in node.input if value in carriers]
        if not read or node.op_type == "IsNaN":
            continue
        if node.op_type == "Where" and not node.domain:
            condition, chosen, other = node.input
            if condition in carriers:
                return False
            if absent.get(condition) == other and chosen not in carriers:
                ends += 1  # replaced
            else:
                carriers.add(node.output[0])
        elif node.op_type in _MOVES and not node.domain:
            if node.op_type != "Concat" and read != [node.input[0]]:
                return False  # an index or a shape
            carriers.update(node.output)
        elif node.op_type == "Cast" and _cast_to(node) in _FLOATS:
            carriers.update(node.output)
        elif is_kept(node) and node.op_type in ensemble.OPERATORS and _tracks_missing(node):
            ends += 1
        else:
            return False
    return ends > 0 and carriers.isdisjoint(output.name for output in model.graph.output)


def _tracks_missing(node: onnx.NodeProto) -> bool:
    """Whether the trees say for a branch that missing values go to the child `true`, as no default does."""
    return bool(ensemble.ints(node, "nodes_missing_value_tracks_true").any())


def _cast_to(node: onnx.NodeProto) -> int:
    return next((each.i for each in node.attribute if each.name == "to"), 0)
