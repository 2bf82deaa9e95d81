"""A model file of any format that can be imported.

All of them pass through ONNX: what is compiled is then checked against ONNX Runtime, whatever it was
written in.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from numpy.typing import ArrayLike

from builder.errors import ModelError
from builder.importer.model_file import file_sha256
from builder.importer.onnx_import import ImportedModel, import_onnx
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet

# How to come from what people have to what can be imported.
_CONVERSIONS: Final = MappingProxyType(
    {
        ".tflite": "convert it: python -m tf2onnx.convert --tflite MODEL.tflite --output MODEL.onnx",
        ".pb": "convert it: python -m tf2onnx.convert --saved-model FOLDER --output MODEL.onnx",
        ".keras": "export it: model.export('MODEL.onnx', format='onnx')",
        ".h5": "export it: keras.saving.load_model(...).export('MODEL.onnx', format='onnx')",
        ".pt": "export it: torch.onnx.export(model, inputs, 'MODEL.onnx')",
        ".pth": "export it: torch.onnx.export(model, inputs, 'MODEL.onnx')",
        ".safetensors": "it holds weights without a network: export the model to ONNX",
    }
)


def load(
    path: str | os.PathLike[str],
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    progress: Callable[[str], None] | None = None,
) -> ImportedModel:
    """Import a model file by its suffix.

    Parameters
    ----------
    path
        An ONNX model (`.onnx`, or any other suffix that is not named here), or a program saved by
        `torch.export.save` (`.pt2`, which needs `torch` and `onnxscript`).
    input_shapes, input_values, progress
        As `import_onnx` takes them.

    Raises
    ------
    ModelError
        If the file cannot be read, is of a format that needs conversion, or needs a package that is not
        installed.
    ShapeError, UnsupportedOperatorError
        If as `import_onnx` raises them.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in _CONVERSIONS:
        raise ModelError(
            f"expected an ONNX or PyTorch export (.pt2) file, got {path}", hint=_CONVERSIONS[suffix]
        )
    if suffix != ".pt2":
        return import_onnx(path, input_shapes=input_shapes, input_values=input_values, progress=progress)
    return _load_exported_program(path, input_shapes, input_values, progress)


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
            hint="pip install torch onnxscript; or export to ONNX where PyTorch is",
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
