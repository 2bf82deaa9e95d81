"""Keras (`.keras`, `.h5`) and TensorFlow (folders of a SavedModel).

`keras_process.py` converts them. With TensorFlow the result is a TensorFlow Lite model, which this program
reads as any other one; with PyTorch as Keras' backend, an ONNX model.
"""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Final

from builder.errors import ModelError
from builder.importer.frameworks.conversion import Framework, Settings, import_with
from builder.importer.model_file import MAX_MODEL_BYTES, file_sha256
from builder.importer.onnx_import import ImportedModel

SUFFIXES: Final = frozenset({".keras", ".h5"})
_PROGRAM: Final = Path(__file__).with_name("keras_process.py")
KERAS: Final = Framework(
    "Keras",
    _PROGRAM,
    (("keras", "tensorflow"), ("keras", "torch", "onnxscript")),
    "tensorflow",
)
TENSORFLOW: Final = Framework("TensorFlow", _PROGRAM, (("tensorflow",),), "tensorflow")
# A SavedModel has a graph, two files of variables, and assets.
_MAX_FILES: Final = 1000
_BEGINNINGS: Final = {".keras": b"PK\x03\x04", ".h5": b"\x89HDF"}


def load_keras(path: Path, settings: Settings) -> ImportedModel:
    """Import a file of Keras or the folder of a SavedModel.

    Raises
    ------
    ModelError
        If it cannot be read, no Python has the framework, or the framework or the importer refuses it.
    ShapeError
        If names, shapes or values do not fit the model, or some are missing.
    """
    if path.is_dir():
        digest = _digest_of_folder(path)

        def place_folder(folder: Path) -> None:
            shutil.copytree(path, folder / "saved_model")

        model = import_with(TENSORFLOW, str(path), place_folder, settings)
        return replace(model, source_sha256=digest, name=path.resolve().name)
    digest = file_sha256(path)
    if path.stat().st_size > MAX_MODEL_BYTES:
        raise ModelError(
            f"expected a model of at most {MAX_MODEL_BYTES} bytes, got {path.stat().st_size}: {path}"
        )
    suffix = path.suffix.lower()
    with path.open("rb") as stream:
        if not stream.read(8).startswith(_BEGINNINGS[suffix]):
            raise ModelError(
                f"expected a model that Keras saved, got a damaged file or another format: {path}",
                hint="save it again: model.save('MODEL.keras')",
            )

    def place(folder: Path) -> None:
        shutil.copyfile(path, folder / f"model{suffix}")

    model = import_with(KERAS, str(path), place, settings)
    return replace(model, source_sha256=digest, name=path.stem)


def _digest_of_folder(path: Path) -> str:
    """SHA-256, in hexadecimal, of the names and digests of all files of a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    total = sum(file.stat().st_size for file in files)
    if len(files) > _MAX_FILES or total > MAX_MODEL_BYTES:
        raise ModelError(
            f"expected a SavedModel of at most {_MAX_FILES} files and {MAX_MODEL_BYTES} bytes, "
            f"got {len(files)} files of {total} bytes: {path}"
        )
    lines = (f"{file.relative_to(path)} {file_sha256(file)}" for file in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
