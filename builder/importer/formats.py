"""Load a model file of any supported format.

Every format is converted to ONNX first, so every compiled model can be compared with ONNX Runtime.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from numpy.typing import ArrayLike

from builder.errors import ModelError
from builder.importer.classic.boosted import to_onnx
from builder.importer.classic.lightgbm_file import read_lightgbm
from builder.importer.classic.xgboost_file import read_xgboost
from builder.importer.model_file import file_sha256
from builder.importer.onnx_import import ImportedModel, import_onnx
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet
from builder.model_path import check_format

# Models of boosted trees, in the formats of the libraries that trained them.
_BOOSTED: Final = frozenset({".json", ".ubj", ".txt"})


def load(
    path: str | os.PathLike[str],
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ImportedModel:
    """Import a model file; its suffix decides the format.

    Parameters
    ----------
    path
        A program saved by `torch.export.save` (`.pt2`; needs `torch` and `onnxscript`), a TensorFlow Lite
        file (`.tflite`), a model saved by XGBoost (`.json`, `.ubj`) or by LightGBM (`.txt`), or an ONNX
        model (any other suffix).
    input_shapes, input_values, progress
        As in `import_onnx`.

    Raises
    ------
    ModelError
        If the file cannot be read, must be converted first, or needs a package that is not installed.
    ShapeError
        If names, shapes or values do not fit the model, or some are missing.
    UnsupportedOperatorError
        If operators cannot be imported.
    ParityError
        If LiteRT is installed and gives other numbers for a `.tflite` file.
    """
    path = Path(path)
    check_format(path)
    suffix = path.suffix.lower()
    if suffix == ".tflite":
        return _load_tflite(path, input_shapes, input_values, progress)
    if suffix in _BOOSTED:
        return _load_boosted(path, input_shapes, input_values, progress)
    if suffix != ".pt2":
        return import_onnx(path, input_shapes=input_shapes, input_values=input_values, progress=progress)
    return _load_exported_program(path, input_shapes, input_values, progress)


def _load_tflite(
    path: Path,
    input_shapes: Mapping[str, Sequence[int]] | None,
    input_values: Mapping[str, ArrayLike] | None,
    progress: Callable[[str], None] | None,
) -> ImportedModel:
    try:
        import tflite
    except ImportError as error:
        raise ModelError(
            f"importing {path} needs the package {error.name}, which is not installed",
            hint="pip install tflite",
        ) from error
    del tflite
    from builder.importer.tflite.loading import load_tflite

    file = load_tflite(path, input_shapes, progress or (lambda _: None))
    model = import_onnx(file.model, input_values=input_values, progress=progress)
    return replace(
        model,
        source_sha256=file.sha256,
        name=path.stem,
        notes=(*file.notes, *model.notes),
        preprocess=file.declared.preprocess,
        labels=file.declared.labels,
    )


def _load_boosted(
    path: Path,
    input_shapes: Mapping[str, Sequence[int]] | None,
    input_values: Mapping[str, ArrayLike] | None,
    progress: Callable[[str], None] | None,
) -> ImportedModel:
    notes: list[str] = []
    if path.suffix.lower() == ".txt":
        boosted, digest = read_lightgbm(path)
    else:
        boosted, digest = read_xgboost(path, notes.append)
    if progress is not None:
        for note in notes:
            progress(note)
    model = import_onnx(
        to_onnx(boosted, path.stem), input_shapes=input_shapes, input_values=input_values, progress=progress
    )
    return replace(model, source_sha256=digest, name=path.stem, notes=(*notes, *model.notes))


def _load_exported_program(
    path: Path,
    input_shapes: Mapping[str, Sequence[int]] | None,
    input_values: Mapping[str, ArrayLike] | None,
    progress: Callable[[str], None] | None,
) -> ImportedModel:
    digest = file_sha256(path)
    try:
        import onnxscript
        import torch
    except ImportError as error:
        raise ModelError(
            f"importing {path} needs the package {error.name}, which is not installed",
            hint="pip install torch onnxscript, or export the model to ONNX on a machine with PyTorch",
        ) from error
    del onnxscript
    try:
        with quiet(), torch.no_grad():
            program = torch.export.load(path)
            exported = torch.onnx.export(program, dynamo=True)
    except FOREIGN_FAILURES as error:
        raise ModelError(f"PyTorch cannot read or export {path}: {first_line(error)}") from error
    model = import_onnx(
        exported.model_proto, input_shapes=input_shapes, input_values=input_values, progress=progress
    )
    return replace(model, source_sha256=digest, name=path.stem)
