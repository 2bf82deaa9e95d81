"""Files of other formats are imported if possible, otherwise a hint says how to convert them."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from builder.errors import ModelError
from builder.importer import load
from tests.builder.importer.frameworks.archive import write_pt2


def test_an_onnx_file_of_any_suffix_is_imported(tmp_path: Path, relu: onnx.ModelProto) -> None:
    for name in ("relu.onnx", "relu.ONNX", "relu.model", "relu"):
        path = tmp_path / name
        path.write_bytes(relu.SerializeToString())
        assert load(path).name == "relu"
        assert load(str(path)).inputs[0].shape == (2, 3)


@pytest.mark.parametrize("suffix", [".pb", ".h5", ".keras", ".pt", ".pth", ".pte", ".safetensors"])
def test_a_format_that_needs_conversion_gets_a_command(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"x")
    with pytest.raises(ModelError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_a_tflite_file_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.tflite"
    path.write_bytes(b"x")
    without(monkeypatch, "tflite")
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "tflite" in str(caught.value)
    assert caught.value.hint == "pip install tflite"


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    genuine: Callable[..., Any] = builtins.__import__

    def fake(name: str, *args: Any, **options: Any) -> Any:
        if name.partition(".")[0] == missing:
            raise ImportError(f"No module named '{missing}'", name=missing)
        return genuine(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_a_pytorch_program_without_pytorch_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needs torch and onnxscript, which") as caught:
        load(write_pt2(tmp_path / "model.pt2"), python=sys.executable)
    assert caught.value.hint == f"{sys.executable} -m pip install torch onnxscript"


@pytest.mark.parametrize(
    ("name", "content", "needed"),
    [
        ("m.keras", b"PK\x03\x04", "keras and tensorflow"),
        ("m.h5", b"\x89HDF\r\n", "keras and tensorflow"),
        ("saved_model.pb", b"", "tensorflow"),
    ],
)
def test_a_keras_model_without_keras_says_what_to_install(
    tmp_path: Path, name: str, content: bytes, needed: str
) -> None:
    path = tmp_path / "folder" / name
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ModelError, match=f"needs {needed}, which") as caught:
        load(path.parent if name == "saved_model.pb" else path, python=sys.executable)
    assert caught.value.hint == f"{sys.executable} -m pip install tensorflow"


def test_the_graph_of_a_saved_model_is_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "saved_model.pb"
    path.touch()
    with pytest.raises(ModelError, match="expected the folder of a SavedModel") as caught:
        load(path)
    assert caught.value.hint == f"give the folder: {tmp_path}"


def test_a_missing_pytorch_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.pt2"):
        load(tmp_path / "absent.pt2")
