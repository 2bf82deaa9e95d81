from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError, ShapeError
from builder.running import inputs
from builder.running.inputs import Picture, Sound, read_inputs
from tests import damaged_archives

SPECS = (TensorSpec("image", "FP32", (1, 4)), TensorSpec("mask", "INT64", (1, 4)))


def test_no_inputs_are_no_arrays() -> None:
    assert read_inputs(None, SPECS) == {}


def test_arrays_are_taken_by_name() -> None:
    given = read_inputs({"mask": [[1, 0, 1, 0]]}, SPECS)
    assert not isinstance(given, Picture | Sound)
    assert list(given) == ["mask"]
    np.testing.assert_array_equal(given["mask"], [[1, 0, 1, 0]])


def test_npz_file_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", image=np.ones((1, 4), "float32"))
    given = read_inputs(tmp_path / "inputs.npz", SPECS)
    assert not isinstance(given, Picture | Sound)
    assert given["image"].dtype == np.float32


@pytest.mark.parametrize(
    ("name", "content_type"), [("a.JPG", "image/jpeg"), ("a.jpeg", "image/jpeg"), ("a.png", "image/png")]
)
def test_picture_is_recognised_by_its_suffix(tmp_path: Path, name: str, content_type: str) -> None:
    (tmp_path / name).write_bytes(b"bytes")
    expected = Picture(b"bytes", content_type, Path(name).suffix.lower())
    assert read_inputs(str(tmp_path / name), SPECS) == expected


@pytest.mark.parametrize("which", damaged_archives.DAMAGED)
def test_damaged_arrays_give_one_line(which: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"damaged\.npz: expected an \.npz file") as caught:
        read_inputs(damaged_archives.write(tmp_path, which), SPECS)
    assert "\n" not in str(caught.value)


def test_unknown_name_lists_the_inputs(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", imag=np.ones(4))
    for given in ({"imag": np.ones(4)}, tmp_path / "inputs.npz"):
        with pytest.raises(ShapeError, match=r"'imag' is not in the graph. Expected inputs: 'image, mask'"):
            read_inputs(given, SPECS)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"not an npz"])
def test_file_that_is_not_an_npz_gets_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "inputs.npz").write_bytes(content)
    with pytest.raises(ModelError, match=r"expected an \.npz file") as caught:
        read_inputs(tmp_path / "inputs.npz", SPECS)
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_not_unpickled(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", image=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ModelError, match=r"expected an \.npz file"):
        read_inputs(tmp_path / "inputs.npz", SPECS)


def test_missing_picture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.png: cannot be read"):
        read_inputs(tmp_path / "absent.png", SPECS)


def test_large_picture_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_FILE_BYTES", 4)
    (tmp_path / "large.png").write_bytes(b"12345")
    with pytest.raises(ModelError, match="at most 4 bytes, got 5"):
        read_inputs(tmp_path / "large.png", SPECS)


def test_other_file_is_told_what_is_taken_and_nothing_unsafe_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A project")
    with pytest.raises(ModelError, match=r"expected a picture \(\.jpg, \.png\), a recording") as caught:
        read_inputs(tmp_path / "README.md", [])
    assert "pickle" not in str(caught.value)
