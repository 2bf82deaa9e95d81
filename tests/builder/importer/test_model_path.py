from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.importer.model_path import check_exists, check_format, is_saved_model, models_in


def test_a_mistyped_name_gets_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.onnx").touch()
    with pytest.raises(ModelError, match="no such file") as caught:
        check_exists(tmp_path / "digit.onnx")
    assert caught.value.hint == f"did you mean {tmp_path / 'digits.onnx'}?"
    with pytest.raises(ModelError, match="got a folder") as caught:
        check_exists(tmp_path)
    assert caught.value.hint == f"in {tmp_path}: digits.onnx"
    check_exists(tmp_path / "digits.onnx")
    assert models_in(tmp_path / "absent", "x") == "download or export the model again"


def test_a_format_that_must_be_converted_is_refused() -> None:
    check_format(Path("a.onnx"))
    check_format(Path("a.tflite"))
    with pytest.raises(ModelError, match="expected a model of ONNX, TensorFlow Lite") as caught:
        check_format(Path("a.PTE"))
    assert "torch.export.save" in str(caught.value.hint)


def test_the_folder_of_a_saved_model_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").touch()
    check_exists(tmp_path)
    assert is_saved_model(tmp_path)
    assert not is_saved_model(tmp_path / "saved_model.pb")


@pytest.mark.parametrize("name", ["missing.onnx", ".", "x" * 5000, "null\0.onnx"])
def test_a_path_without_a_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "other.onnx").touch()
    with pytest.raises(ModelError) as caught:
        check_exists(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
