"""Networks in int8 for all engines."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import bench_arm, tables
from benchmarks.guard import convolutions
from benchmarks.prepare import HALVES, INT8, MODELS, fixed_shapes, source
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
    monkeypatch.setattr("benchmarks.prepare.quantised", lambda model, target: f"int8 of {model} for {target}")
    assert source("resnet18-int8") == "int8 of resnet18 for host"
    assert source("resnet18-int8", "rpi4") == "int8 of resnet18 for rpi4"
    assert source("resnet18-fp16") == "resnet18"
    assert fixed_shapes("bert-fp16") == fixed_shapes("bert") is not None


def test_networks_in_float16_are_counted_only_where_the_core_computes_in_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        bench_arm.main(["--models", HALVES[0], "--cpu", "cortex-a72"])
    assert "need --cpu cortex-a76, which computes in it, got cortex-a72" in capsys.readouterr().err


def test_the_share_of_another_precision_is_told_by_the_networks_name() -> None:
    counts = {"a": {"edgebundle": 4.0}, "a-int8": {"edgebundle": 1.0}, "a-fp16": {"edgebundle": 2.0}}
    assert tables.over_float32(counts, "edgebundle") == {"a": 0.25}
    assert tables.over_float32(counts, "edgebundle", "-fp16") == {"a": 0.5}
