"""Shapes and names of Keras' models; what needs Keras itself is tested in tests/frameworks."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.importer.frameworks import keras_process
from builder.importer.frameworks.keras_floats import other_floats
from builder.importer.frameworks.keras_process import (
    _fixed,
    _output_names,
    _RefusalError,
    _unique,
    _unknown_operators,
)


def test_an_open_batch_is_one_and_a_note_says_so() -> None:
    shapes, notes = _fixed(["image", "size"], [(None, 8, 8, 3), (2,)], {})
    assert shapes == [(1, 8, 8, 3), (2,)]
    assert notes == [
        "input 'image' [?,8,8,3]: the batch is open and is set to 1 (--input-shapes sets another)"
    ]
    assert _fixed(["image"], [(None, None, 3)], {"image": [4, 9, 3]}) == ([(4, 9, 3)], [])
    assert _fixed(["any"], [None], {"any": [4]}) == ([(4,)], [])


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((None, None, 3), {}, r"input 'x': expected a fixed shape, got \[\?,\?,3\]"),
        ((None, 3), {"x": [1, 4]}, r"input 'x': expected the shape \[\?,3\], got \[1, 4\]"),
        ((None, 3), {"x": [1, 3, 1]}, "expected the shape"),
        ((None, 3), {"y": [1]}, "the model has no input 'y'; its inputs are x"),
        (None, {}, "got unknown"),
    ],
)
def test_a_shape_that_does_not_fit(
    shape: tuple[int | None, ...] | None, given: dict[str, list[int]], expected: str
) -> None:
    with pytest.raises(_RefusalError, match=expected):
        _fixed(["x"], [shape], given)


def test_names_of_outputs() -> None:
    assert _output_names({"b": 1, "a": 2}, None, 2) == ["a", "b"]
    assert _output_names([1], ["probs"], 1) == ["probs"]
    assert _output_names([1], ["keras_tensor_7"], 1) == ["output"]
    assert _output_names([1, 2], ["same", "same"], 2) == ["output_0", "output_1"]
    assert _unique(["a", "b", "a"]) == ["a_0", "b", "a_2"]


def test_operators_that_tensorflow_lite_lacks() -> None:
    text = "Some ops are not supported ...\nTF Select ops: Erfc, SelfAdjointEigV2\nDetails: ..."
    assert [entry["operator"] for entry in _unknown_operators(text)] == ["tf.Erfc", "tf.SelfAdjointEigV2"]


def graph(*nodes: tuple[str, dict[str, int]], inner: tuple[tuple[str, dict[str, int]], ...] = ()) -> Any:
    """Return a graph as TensorFlow has it, with one function; each node an operator and its types."""

    def made(operator: str, types: dict[str, int]) -> Any:
        empty = SimpleNamespace(type=[])
        return SimpleNamespace(
            op=operator, attr={name: SimpleNamespace(type=t, list=empty) for name, t in types.items()}
        )

    functions = [SimpleNamespace(node_def=[made(*node) for node in inner])]
    return SimpleNamespace(node=[made(*node) for node in nodes], library=SimpleNamespace(function=functions))


FLOAT32, FLOAT64, INT32, UINT8, BFLOAT16, FLOAT16 = 1, 2, 3, 4, 14, 19


def test_types_that_a_graph_computes_in() -> None:
    assert other_floats(graph(("Mul", {"T": FLOAT32}), ("Cast", {"SrcT": INT32, "DstT": FLOAT32}))) == []
    assert other_floats(graph(("Mul", {"T": FLOAT16}), inner=(("Add", {"T": BFLOAT16}),))) == [
        "float16",
        "bfloat16",
    ]
    assert other_floats(graph(("Cast", {"SrcT": UINT8, "DstT": FLOAT64}))) == ["float64"]
    assert other_floats(graph(("Cast", {"SrcT": INT32, "DstT": FLOAT16}))) == ["float16"]


def test_what_float32_would_change_by_more_than_rounding_stays() -> None:
    """An integer that float32 cannot hold, such as a time in seconds, and bits of a number."""
    assert other_floats(graph(("Mul", {"T": FLOAT64}), ("Cast", {"SrcT": INT32, "DstT": FLOAT64}))) == []
    assert other_floats(graph(("Bitcast", {"T": FLOAT16, "type": 5}))) == []


@pytest.mark.parametrize(
    ("version", "opened"),
    [("3.8.0", False), ("3.11.2", False), ("3.9", False), ("3.11.3", True), ("4.0.0.dev1", True)],
)
def test_old_keras_opens_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, opened: bool
) -> None:
    """It runs the code of Lambda layers in a .h5 file, whatever `safe_mode` says."""

    def load() -> None:
        raise ValueError("opened")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "keras", SimpleNamespace(__version__=version))
    monkeypatch.setattr(keras_process, "_load", load)
    reply = keras_process.Conversion().answer({"command": "convert"})
    refusal = "expected Keras 3.11.3 or newer, because older ones run the code of a model; got Keras "
    assert reply["error"] == ("ValueError: opened" if opened else refusal + version)
