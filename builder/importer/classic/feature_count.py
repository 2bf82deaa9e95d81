"""How many columns the trees of a model read, where its file does not say how wide its table is."""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx

from builder.importer.classic.ensemble import OPERATORS, attribute, ints

# Operators that keep the columns of their first input.
_KEEPS: Final = frozenset(
    {"Add", "Binarizer", "Cast", "Clip", "Div", "Identity", "Imputer", "Mul", "Normalizer", "Scaler", "Sub"}
)


def columns_needed(graph: onnx.GraphProto, name: str) -> int:
    """Return how many columns the trees that read an input need: the widest feature's place plus one.

    Result: the number, 0 if no tree reads the input's own columns.
    """
    same = {name}
    widest = 0
    for node in graph.node:
        if not node.input or node.input[0] not in same:
            continue
        if node.op_type in _KEEPS:
            same.add(node.output[0])
        elif node.op_type in OPERATORS:
            features = ints(node, "nodes_featureids")
            modes = attribute(node, "nodes_modes")
            if modes is not None and len(modes.strings) == features.size:
                features = features[np.array([mode != b"LEAF" for mode in modes.strings], bool)]
            widest = max(widest, int(features.max(initial=-1)) + 1)
    return widest
