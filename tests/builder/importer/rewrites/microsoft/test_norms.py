"""Normalisations of com.microsoft."""

from __future__ import annotations

import numpy as np
import pytest

from tests.builder.importer.rewrites.microsoft.contrib import Node, check, ints, randn

LOOSE = {"epsilon": 1e-3}
TABLES = [randn(9, 8), randn(6, 8), randn(2, 8), randn(8), randn(8)]
MASK = np.array([[1, 1, 1, 0, 0], [0, 1, 1, 0, 1]], "i4")
CASES = {
    "rms": Node("SimplifiedLayerNormalization", [randn(2, 3, 4), randn(4)], domain="", attributes=LOOSE),
    "in an old opset": Node(
        "LayerNormalization", [randn(2, 3, 4), randn(4), randn(4)], domain="", opset=11, attributes=LOOSE
    ),
    "skip": Node(
        "SkipLayerNormalization",
        [randn(2, 3, 4), randn(2, 3, 4), randn(4), randn(4), randn(4)],
        outputs=(0, 3),
        attributes=LOOSE,
    ),
    "skip without beta": Node("SkipLayerNormalization", [randn(2, 3, 4), randn(2, 3, 4), randn(4)]),
    "skip of one batch": Node("SkipLayerNormalization", [randn(2, 3, 4), randn(3, 4), randn(4), randn(4)]),
    "skip rms": Node(
        "SkipSimplifiedLayerNormalization",
        [randn(2, 3, 4), randn(2, 3, 4), randn(4), randn(4)],
        outputs=(0, 3),
    ),
    "with statistics": Node(
        "LayerNormalization", [randn(2, 3, 4), randn(4), randn(4)], domain="", outputs=(0, 1, 2)
    ),
    "statistics that nothing reads": Node(
        "LayerNormalization", [randn(2, 3, 4), randn(4), randn(4)], domain="", opset=11, named=3
    ),
    "skip, with statistics that nothing reads": Node(
        "SkipLayerNormalization", [randn(2, 3, 4), randn(2, 3, 4), randn(4), randn(4)], named=3
    ),
    "skip rms, with statistics that nothing reads": Node(
        "SkipSimplifiedLayerNormalization",
        [randn(2, 3, 4), randn(2, 3, 4), randn(4)],
        outputs=(0, 3),
        named=4,
    ),
    "embedding": Node(
        "EmbedLayerNormalization",
        [ints(2, 5), ints(2, 5, high=2), *TABLES, MASK],
        range(2, 7),
        outputs=(0, 1, 2),
        attributes=LOOSE,
    ),
    "embedding of given positions": Node(
        "EmbedLayerNormalization",
        [ints(2, 5), ints(2, 5, high=2), *TABLES, MASK, ints(1, 5, high=6)],
        range(2, 7),
        outputs=(0, 1),
    ),
    "embedding of words": Node(
        "EmbedLayerNormalization",
        [ints(2, 5), None, TABLES[0], TABLES[1], None, *TABLES[3:]],
        range(2, 7),
        outputs=(0, 1),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_onnx_runtime(case: str) -> None:
    check(CASES[case])
