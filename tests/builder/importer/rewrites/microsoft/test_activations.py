"""Activations of com.microsoft."""

from __future__ import annotations

from math import erf

import numpy as np
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


# ONNX Runtime has no kernels for these on a CPU: they are compared with their definition.


def test_bias_split_gelu_gates_the_left_half() -> None:
    x, bias = randn(2, 3, 8), randn(8)
    left, right = np.split(x + bias, 2, axis=-1)
    gelu = right * 0.5 * (1 + np.vectorize(erf)(right / np.sqrt(2)))
    check(Node("BiasSplitGelu", [x, bias]), [(left * gelu).astype("f4")])


def test_bias_add_adds_all_three() -> None:
    x, bias, skip = randn(2, 3, 8), randn(8), randn(2, 3, 8)
    check(Node("BiasAdd", [x, bias, skip]), [x + bias + skip])


def test_bias_dropout_drops_nothing() -> None:
    x, bias, residual = randn(2, 4), randn(4), randn(2, 4)
    node = Node("BiasDropout", [x, bias, residual], outputs=(0, 1))
    check(node, [x + bias + residual, np.ones((2, 4), bool)])


@pytest.mark.parametrize(("shape", "inner"), [((2, 1, 1, 5), 1), ((3, 5), 0)])
def test_bias_softmax(shape: tuple[int, ...], inner: int) -> None:
    x, bias = randn(2, 4, 3, 5), randn(*shape)
    power = np.exp(x + bias)
    node = Node("BiasSoftmax", [x, bias], attributes={"axis": 3, "is_inner_broadcast": inner})
    check(node, [power / power.sum(-1, keepdims=True)])
