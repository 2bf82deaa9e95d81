"""Paths without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.importer.model_path import require_file


@pytest.mark.parametrize("name", ["missing.onnx", ".", "x" * 5000, "null\0.onnx"])
def test_a_path_without_a_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / "other.onnx").touch()
    with pytest.raises(ModelError) as caught:
        require_file(tmp_path / name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_file_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    require_file(tmp_path / "model.onnx")
