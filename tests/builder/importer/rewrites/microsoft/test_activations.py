"""Activations of com.microsoft."""

from __future__ import annotations

import pytest

from tests.builder.importer.rewrites.microsoft.contrib import Node, check, randn

CASES = {
    "gelu": Node("Gelu", [randn(2, 3, 4)]),
    "fast gelu": Node("FastGelu", [randn(2, 3, 4)]),
    "fast gelu with a bias": Node("FastGelu", [randn(2, 3, 4), randn(4)]),
    "bias gelu": Node("BiasGelu", [randn(2, 3, 4), randn(4)]),
    "quick gelu": Node("QuickGelu", [randn(2, 3, 4)]),
    "quick gelu of another slope": Node("QuickGelu", [randn(2, 3, 4)], attributes={"alpha": 1.3}),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_onnx_runtime(case: str) -> None:
    check(CASES[case])
