"""What the path of a model tells without reading the file, and without a library that could.

Leaves the contents to the rest of this room, which loads the compiler.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Final

from builder.errors import ModelError
from builder.spelling import READABLE, closest

EXPORT_HINT: Final = "download or export the model again"
_SUFFIXES: Final = frozenset({".onnx", ".pt2", ".tflite", ".keras", ".h5", ".hdf5"})
_LISTED: Final = 6  # how many models a hint names
_SAVED_MODEL: Final = "saved_model.pb"
# Suffix -> how to convert a file of that format.
CONVERSIONS: Final = MappingProxyType(
    {
        ".pb": "convert it: tf.lite.TFLiteConverter.from_saved_model(FOLDER).convert() makes a .tflite",
        ".pte": "it is compiled for ExecuTorch: torch.export.save(program, 'MODEL.pt2') before to_edge()",
        ".safetensors": "it holds only weights: export the model to ONNX",
    }
)


def is_saved_model(path: Path) -> bool:
    """Whether a path is a folder that TensorFlow saved a model in."""
    return path.is_dir() and (path / _SAVED_MODEL).is_file()


def check_format(path: Path) -> None:
    """Check that the suffix is not that of a format that must be converted first.

    Raises
    ------
    ModelError
        If it is; the hint says how.
    """
    suffix = path.suffix.lower()
    if path.name == _SAVED_MODEL:
        raise ModelError(
            f"expected the folder of a SavedModel, got {path}", hint=f"give the folder: {path.parent}"
        )
    if suffix in CONVERSIONS:
        raise ModelError(
            "expected a model of ONNX, TensorFlow Lite, PyTorch (.pt2), Keras, XGBoost or LightGBM, "
            f"got {path}",
            hint=CONVERSIONS[suffix],
        )


def check_exists(path: Path) -> None:
    """Check that the file exists, or the folder of a SavedModel.

    Raises
    ------
    ModelError
        If there is none, it is another folder, or no file can have that name.
    """
    try:
        if path.is_dir() and not is_saved_model(path):
            raise ModelError(f"expected a model file, got a folder: {path}", hint=models_in(path))
        if not path.exists():
            raise ModelError(f"no such file: {path}", hint=models_in(path.parent, path.name))
    except (OSError, ValueError) as error:  # a name that is too long, or with a null character
        raise ModelError(
            f"cannot read {str(path)!r:.200}: {getattr(error, 'strerror', None) or error}", hint=READABLE
        ) from error


def models_in(folder: Path, wanted: str = "") -> str:
    """Return a hint that names the models in a folder, for a user who mistyped `wanted`."""
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES)
    except OSError:
        names = []
    if not names:
        return EXPORT_HINT
    stems = {Path(name).stem: name for name in names}
    meant = closest(Path(wanted).stem, stems) if wanted else None
    if meant is not None:
        return f"did you mean {folder / stems[meant]}?"
    return f"in {folder}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
