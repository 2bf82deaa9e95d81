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

from agent.bundle.state import check_states
from builder.errors import ModelError
from builder.importer.classic.boosted import FEATURES, to_onnx
from builder.importer.classic.lightgbm_file import read_lightgbm
from builder.importer.classic.xgboost_file import read_xgboost
from builder.importer.edge_scales import fitting
from builder.importer.frameworks.conversion import Settings
from builder.importer.frameworks.keras import SUFFIXES as KERAS_SUFFIXES
from builder.importer.frameworks.keras import load_keras
from builder.importer.frameworks.pt2_archive import describe_pt
from builder.importer.frameworks.pytorch import is_in_memory, load_in_memory, load_program
from builder.importer.model_path import EXPORT_HINT, check_format, is_saved_model
from builder.importer.onnx_import import ImportedModel, import_onnx

# Models of boosted trees, in the formats of the libraries that trained them.
_BOOSTED: Final = frozenset({".json", ".ubj", ".txt"})
# What torch.save and torch.jit.save write.
_PICKLED: Final = frozenset({".pt", ".pth"})


def load(
    model: str | os.PathLike[str] | object,
    example_inputs: object = None,
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    max_iterations: int | None = None,
    python: str | os.PathLike[str] | None = None,
    trusted: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ImportedModel:
    """Import a model file, whose suffix decides the format, or a model of PyTorch in memory.

    Parameters
    ----------
    model
        The path of a program saved by `torch.export.save` (`.pt2`), of a model of Keras (`.keras`, `.h5`,
        `.hdf5`), of a SavedModel's folder, of a TensorFlow Lite file (`.tflite`), of a model saved by XGBoost
        (`.json`, `.ubj`) or by LightGBM (`.txt`), or of an ONNX model (any other suffix). Or a
        `torch.nn.Module` or a `torch.export.ExportedProgram`.
    example_inputs
        The arguments of a module's `forward`: a tensor, a tuple of tensors, or a dict from a name to a
        tensor. Their shapes become the model's.
    input_shapes, input_values, max_iterations, progress
        As in `import_onnx`.
    python
        Path of a Python that has PyTorch or Keras, for models that need them. With None, the environment
        variable `EDGEBUNDLE_PYTHON` names it; without that, it is looked for: this one, the active virtual
        environment, and `python3` of the `PATH`.
    trusted
        Whether the model may use all files and the network of its user: PyTorch, Keras and TensorFlow are
        else confined to their installations and a copy of the model.

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
    settings = Settings(
        input_shapes,
        input_values,
        None if python is None else os.fspath(python),
        progress,
        max_iterations,
        trusted,
    )
    if is_in_memory(model):
        return load_in_memory(model, example_inputs, settings)
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(
            f"expected a path, or a module or program of PyTorch, got {type(model).__name__}",
            hint="save the model to a file first",
        )
    path = Path(model)
    check_format(path)
    suffix = path.suffix.lower()
    if suffix == ".tflite":
        return _load_tflite(path, input_shapes, input_values, progress)
    if suffix in _PICKLED:
        raise describe_pt(path)
    if suffix in KERAS_SUFFIXES or is_saved_model(path):
        return load_keras(path, settings)
    if suffix in _BOOSTED:
        return _load_boosted(path, input_shapes, input_values, progress)
    if suffix != ".pt2":
        return import_onnx(
            path,
            input_shapes=input_shapes,
            input_values=input_values,
            max_iterations=max_iterations,
            progress=progress,
        )
    return load_program(path, settings)


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

    file = load_tflite(path, input_shapes, input_values, progress or (lambda _: None))
    # Again the shapes: in a file, a length of 0 stands for an unknown one.
    model = import_onnx(file.model, input_shapes=input_shapes, input_values=input_values, progress=progress)
    if file.states:
        try:
            check_states(file.states, model.inputs, model.outputs)
        except ValueError as error:
            raise ModelError(
                f"{path}: {error}", hint=f"{EXPORT_HINT}: its states do not fit its inputs and outputs"
            ) from error
    return replace(
        model,
        source_sha256=file.sha256,
        name=path.stem,
        notes=(*file.notes, *model.notes),
        states=file.states,
        preprocess=file.declared.preprocess,
        scales=fitting(file.scales, model.inputs, model.outputs),
        labels=file.declared.labels,
        exported=file.declared.exported,
        class_counts=file.class_counts,
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
    return replace(
        model,
        source_sha256=digest,
        name=path.stem,
        notes=(*notes, *model.notes),
        columns=tuple(boosted.names),
        nan_inputs=(FEATURES,),
    )
