"""Files of Keras and folders of TensorFlow, with a stand-in for Keras."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from builder import load
from builder.compiling.framework_parity import check_import
from builder.errors import ModelError, ParityError
from tests.builder.importer.frameworks.stand_in import stand_in
from tests.builder.importer.tflite.test_conversion import network
from tests.builder.importer.tflite.tflite_file import write

# As `keras_process.py` replies; the model itself is a .tflite file, as TensorFlow's converter makes it.
REPLY = {
    "framework": "Keras 3",
    "inputs": ["image"],
    "outputs": ["probs"],
    "notes": ["the batch is set to 1"],
}


def keras(tmp_path: Path, computed: object, **reply: object) -> str:
    vectors = tmp_path / "vectors"
    vectors.mkdir()
    (vectors / "model.onnx").write_bytes(b"")
    (vectors / "reply.json").write_text(json.dumps({**REPLY, **reply}))
    (vectors / "model.tflite").write_bytes(write(network()))
    np.savez(vectors / "examples.npz", none=np.zeros(1))
    np.savez(vectors / "outputs.npz", output_0=np.asarray(computed))
    copy = f"shutil.copyfile({str(vectors / 'model.tflite')!r}, 'model.tflite')"
    return stand_in(tmp_path, vectors, before=copy)


@pytest.mark.parametrize("kind", ["m.keras", "m.h5", "folder"])
def test_a_model_is_imported_as_its_tflite_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
        (path / "saved_model.pb").write_bytes(b"graph")
    else:
        path.write_bytes(b"PK\x03\x04" if kind == "m.keras" else b"\x89HDF\r\n\x1a\n")
    model = load(path, python=keras(tmp_path, np.zeros((1, 5), np.float32)))
    assert (model.name, model.notes[0]) == (kind.partition(".")[0], "the batch is set to 1")
    assert [spec.name for spec in (*model.inputs, *model.outputs)] == ["image", "probs"]
    assert len(model.source_sha256) == 64
    assert model.reference is not None
    with pytest.raises(ParityError, match="against Keras 3"):  # it did not compute zeros
        check_import(model)


@pytest.mark.parametrize(
    ("floats", "limit"),
    [((), 0.0), (["float64"], 0.0), (["float16"], 1e-2), (["float16", "bfloat16"], 5e-2), (["float1"], 0.0)],
)
def test_the_limit_is_that_of_the_type_that_keras_computes_in(
    tmp_path: Path, floats: list[str], limit: float
) -> None:
    """The file in float32 does not show it."""
    path = tmp_path / "m.keras"
    path.write_bytes(b"PK\x03\x04")
    model = load(path, python=keras(tmp_path, np.zeros((1, 5), np.float32), floats=floats))
    assert model.reference is not None
    assert model.reference.rounding == limit


def test_an_output_with_an_inputs_name_gets_another(tmp_path: Path) -> None:
    """A signature of TensorFlow has names of arguments and of results, which may be the same."""
    (tmp_path / "m.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    python = keras(tmp_path, np.zeros((1, 5), np.float32), outputs=["image"])
    model = load(tmp_path / "m.h5", python=python)
    assert [spec.name for spec in (*model.inputs, *model.outputs)] == ["image", "image_out"]


def test_another_file_with_the_suffix_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.keras"
    path.write_bytes(b"<html>")
    with pytest.raises(ModelError, match="expected a model that Keras saved") as caught:
        load(path)
    assert "model.save" in str(caught.value.hint)


def test_a_folder_of_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"graph")
    monkeypatch.setattr("builder.importer.frameworks.keras._MAX_FILES", 0)
    with pytest.raises(ModelError, match="expected a SavedModel of at most 0 files"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "cycle"])
def test_a_folder_with_other_things_than_files_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "folder"
    (path / "assets").mkdir(parents=True)
    (path / "saved_model.pb").write_bytes(b"graph")
    if kind == "pipe":
        os.mkfifo(path / "assets" / "pipe")
    else:
        target = {"device": "/dev/zero", "folder": "/", "cycle": "."}[kind]
        (path / "assets" / kind).symlink_to(target)
    with pytest.raises(ModelError, match="expected regular files in a SavedModel, got a"):
        load(path, python="/bin/true")


@pytest.mark.parametrize("suffix", [".keras", ".h5", ".pt2"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, suffix: str) -> None:
    os.mkfifo(tmp_path / f"m{suffix}")
    with pytest.raises(ModelError, match="expected a regular file"):
        load(tmp_path / f"m{suffix}", python="/bin/true")


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """As caches of downloads keep models."""
    path = tmp_path / "folder"
    path.mkdir()
    (tmp_path / "blob").write_bytes(b"graph")
    (path / "saved_model.pb").symlink_to(tmp_path / "blob")
    model = load(path, python=keras(tmp_path, np.zeros((1, 5), np.float32)))
    assert model.name == "folder"
