"""Keras (`.keras`, `.h5`, also named `.hdf5`) and TensorFlow (folders of a SavedModel).

`keras_process.py` converts them. With TensorFlow the result is a TensorFlow Lite model, which this program
reads as any other one; with PyTorch as Keras' backend, an ONNX model.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from builder.errors import ModelError
from builder.importer.frameworks.conversion import Framework, Settings, import_with
from builder.importer.model_file import MAX_MODEL_BYTES, file_sha256
from builder.importer.onnx_import import ImportedModel

SUFFIXES: Final = frozenset({".keras", ".h5", ".hdf5"})
_PROGRAM: Final = Path(__file__).with_name("keras_process.py")
KERAS: Final = Framework(
    "Keras", _PROGRAM, (("keras", "tensorflow"), ("keras", "torch", "onnxscript")), "tensorflow"
)
TENSORFLOW: Final = Framework("TensorFlow", _PROGRAM, (("tensorflow",),), "tensorflow")
# A SavedModel has a graph, two files of variables, and assets.
_MAX_FILES: Final = 1000
_BEGINNINGS: Final = {".keras": b"PK\x03\x04", ".h5": b"\x89HDF"}
# Another name of a format.
_OTHER_NAMES: Final = {".hdf5": ".h5"}


def load_keras(path: Path, settings: Settings) -> ImportedModel:
    """Import a file of Keras or the folder of a SavedModel.

    Raises `ModelError` if it cannot be read, no Python has the framework, or the framework or the importer
        refuses it.
    """
    if path.is_dir():
        files = _files(path)
        digest = _digest(path, files)

        def place_folder(folder: Path) -> None:
            for name in files:
                (folder / "saved_model" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path / name, folder / "saved_model" / name)

        model = import_with(TENSORFLOW, str(path), place_folder, settings)
        return replace(model, source_sha256=digest, name=path.resolve().name)
    digest = file_sha256(path)
    suffix = _OTHER_NAMES.get(path.suffix.lower(), path.suffix.lower())
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


def _files(path: Path) -> list[Path]:
    """Return the files of a SavedModel, relative to its folder and sorted: regular ones, bounded together."""
    found: list[Path] = []
    total = 0
    for root, folders, names in os.walk(path):
        found += [Path(root, name).relative_to(path) for name in (*folders, *names)]
        if len(found) > _MAX_FILES:
            raise ModelError(
                f"expected a SavedModel of at most {_MAX_FILES} files and folders, got more: {path}",
                hint="give the folder itself, with saved_model.pb and variables, in a place of its own",
            )
    files: list[Path] = []
    for name in sorted(found):
        is_link = (path / name).is_symlink()
        if (path / name).is_dir() and not is_link:
            continue
        if not (path / name).is_file():
            got = "a link to a folder, or to nothing" if is_link else "a device or a pipe"
            raise ModelError(
                f"expected regular files in a SavedModel, got {got}: {path / name}",
                hint="copy the folder without links: cp -rL FOLDER COPY",
            )
        total += (path / name).stat().st_size
        files.append(name)
    if total > MAX_MODEL_BYTES:
        raise ModelError(
            f"expected a SavedModel of at most {MAX_MODEL_BYTES} bytes, got {total} bytes: {path}",
            hint="save only the serving signature: tf.saved_model.save(model, FOLDER)",
        )
    return files


def _digest(path: Path, files: Sequence[Path]) -> str:
    """SHA-256, in hexadecimal, of the names and digests of all files of a folder."""
    lines = (f"{name} {file_sha256(path / name)}" for name in files)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
