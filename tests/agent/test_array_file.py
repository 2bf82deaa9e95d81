"""Arrays of any name survive a file."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.array_file import read_arrays, write_arrays


def test_arrays_of_any_name(tmp_path: Path) -> None:
    names = ("file", "allow_pickle", "args", "kwds", "a", "a.npy", "a/b:0", "../c", "", "数", "x" * 300)
    arrays: dict[str, Any] = {name: np.full((2, place), place) for place, name in enumerate(names)}
    arrays |= {"scalar": np.float32(3), "texts": np.array(["a", "bc"]), "fortran": np.ones((2, 3), order="F")}
    path = tmp_path / "arrays"
    write_arrays(path, arrays)
    assert list(tmp_path.iterdir()) == [path]
    found = read_arrays(path)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
    with np.load(path) as theirs:
        np.testing.assert_array_equal(theirs["file"], arrays["file"])


def test_objects_are_not_written() -> None:
    with pytest.raises(ValueError, match="pickle"):
        write_arrays(io.BytesIO(), {"a": np.array([object()])})
