"""Why a model is refused, in the words of the framework that it came from, on one screen."""

from __future__ import annotations

import pytest

from builder.errors import ModelError, Obstacle, ShapeError, UnsupportedOperatorError
from builder.importer.advice import MAX_LINES, explain, framework_of


@pytest.mark.parametrize(
    ("producer", "framework"),
    [
        ("pytorch", "PyTorch"),
        ("tf2onnx", "TensorFlow"),
        ("keras", "Keras"),
        ("skl2onnx", "scikit-learn"),
        ("OnnxMLTools", "scikit-learn"),
        ("PaddlePaddle", "Paddle"),
        ("onnxruntime.transformers", "ONNX Runtime"),
        ("my own exporter", ""),
        ("", ""),
    ],
)
def test_the_framework_is_known_by_its_producer(producer: str, framework: str) -> None:
    assert framework_of(producer) == framework


def test_many_obstacles_fit_on_a_screen() -> None:
    obstacles = [Obstacle(f"Op{i}", tuple(f"node{i}_{k}" for k in range(500)), "why") for i in range(40)]
    lines = explain(UnsupportedOperatorError("no", hint="change it", obstacles=obstacles), "pytorch")
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) <= 240
    shown = sum(line.startswith("Op") for line in lines)
    assert lines[-1] == f"and {40 - shown} more operators"
    assert "500 nodes: node0_0, node0_1, node0_2 and 497 more" in lines[0]


def test_a_message_that_says_it_all_gets_no_more_lines() -> None:
    assert explain(ModelError("truncated", hint="change it"), "pytorch") == ()
    assert explain(ShapeError("wrong", hint="change it"), "unknown") == ()


def test_a_layout_of_onnx_runtime_says_how_to_save_the_model() -> None:
    found = [Obstacle("com.microsoft.nchwc.Conv", ("c",), "its layout")]
    assert (
        "ORT_ENABLE_EXTENDED"
        in explain(UnsupportedOperatorError("no", hint="change it", obstacles=found), "")[-1]
    )
