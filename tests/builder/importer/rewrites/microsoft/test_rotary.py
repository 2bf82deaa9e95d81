"""Rotary embeddings of com.microsoft."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builder.importer.rewrites.microsoft.contrib import Node, check, ints, randn

TABLES = [np.cos(randn(16, 4)), np.sin(randn(16, 4))]
PLACES = ints(2, 5, high=16).astype("i8")
CASES = {
    "three axes": Node("RotaryEmbedding", [randn(2, 5, 32), PLACES, *TABLES], (2, 3)),
    "from a first position": Node("RotaryEmbedding", [randn(2, 5, 32), np.array([3]), *TABLES], (2, 3)),
    "four axes": Node("RotaryEmbedding", [randn(2, 4, 5, 8), PLACES, *TABLES], (2, 3)),
    "a part of each head": Node(
        "RotaryEmbedding",
        [randn(2, 5, 64), PLACES, *TABLES],
        (2, 3),
        attributes={"num_heads": 4, "rotary_embedding_dim": 8},
    ),
}


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_onnx_runtime(case: str, interleaved: int) -> None:
    node = CASES[case]
    attributes = {**node.attributes, "interleaved": interleaved}
    check(Node(node.op, node.inputs, node.weights, attributes=attributes))
