"""Files, folders and patterns as inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.running.input_files import input_files


def test_files_folders_and_patterns_give_each_file_once(tmp_path: Path) -> None:
    for name in ("b.jpg", "a.PNG", "notes.txt", "x.npz", "odd[1].jpg"):
        (tmp_path / name).touch()
    a, b, odd = (tmp_path / name for name in ("a.PNG", "b.jpg", "odd[1].jpg"))
    assert input_files([str(tmp_path)]) == [a, b, odd]
    assert input_files([str(tmp_path / "*.jpg"), str(a), str(b)]) == [b, odd, a]
    assert input_files([str(odd)]) == [odd]  # a file's own name is no pattern
    assert input_files(["absent.jpg"]) == [Path("absent.jpg")]  # which is told when it is read


def test_a_folder_or_pattern_without_files_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="expected pictures in the folder, got none"):
        input_files([str(tmp_path)])
    with pytest.raises(ModelError, match="expected files that match, got none"):
        input_files([str(tmp_path / "*.jpg")])
