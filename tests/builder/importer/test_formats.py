"""Files of other formats are imported if possible, otherwise a hint says how to convert them."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from builder.errors import ModelError
from builder.importer import load


def test_an_onnx_file_of_any_suffix_is_imported(tmp_path: Path, relu: onnx.ModelProto) -> None:
    for name in ("relu.onnx", "relu.ONNX", "relu.model", "relu"):
        path = tmp_path / name
        path.write_bytes(relu.SerializeToString())
        assert load(path).name == "relu"
        assert load(str(path)).inputs[0].shape == (2, 3)


@pytest.mark.parametrize("suffix", [".pb", ".h5", ".keras", ".pt", ".pth", ".safetensors"])
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


def test_a_pytorch_program_without_pytorch_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt2"
    path.write_bytes(b"PK\x03\x04")
    without(monkeypatch, "onnxscript")
    with pytest.raises(ModelError) as caught:
        load(path)
    assert "onnxscript" in str(caught.value)
    assert "pip install torch onnxscript" in (caught.value.hint or "")


def test_a_missing_pytorch_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.pt2"):
        load(tmp_path / "absent.pt2")
