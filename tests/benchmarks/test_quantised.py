"""Networks in int8 for all engines."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.guard import convolutions
from benchmarks.prepare import INT8, MODELS, source
from benchmarks.quantised import quantised


def test_every_convolution_and_product_is_quantised() -> None:
    before, after = convolutions(), quantised(convolutions())
    kinds = [Counter(node.op_type for node in model.graph.node) for model in (before, after)]
    assert kinds[1]["Conv"] == kinds[0]["Conv"]
    made = {output: node for node in after.graph.node for output in node.output}
    for node in after.graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            assert {made[name].op_type for name in node.input[:2]} == {"DequantizeLinear"}, node.name


def test_the_same_network_gives_the_same_bytes() -> None:
    assert quantised(convolutions()).SerializeToString() == quantised(convolutions()).SerializeToString()


def test_a_name_says_which_network_is_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(INT8) < set(MODELS)
    monkeypatch.setattr("benchmarks.prepare.generate", lambda name: name)
    monkeypatch.setattr("benchmarks.prepare.quantised", lambda model: f"int8 of {model}")
    assert source("resnet18-int8") == "int8 of resnet18"
