"""From a `.tflite` file to the ONNX model that the importer takes: read, convert, compare with LiteRT."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from builder.importer.model_file import read_bytes
from builder.importer.tflite.comparison import compare
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.metadata import Declared, describe, read_metadata
from builder.importer.tflite.schema import read


@dataclass(frozen=True, slots=True)
class TfliteFile:
    """A converted file.

    Attributes
    ----------
    model
        An ONNX model with static shapes and the file's inputs and outputs.
    sha256
        SHA-256 of the file, in hexadecimal.
    declared
        What the file says about its pictures and labels.
    """

    model: onnx.ModelProto
    sha256: str
    declared: Declared


def load_tflite(
    path: Path, input_shapes: Mapping[str, Sequence[int]] | None, progress: Callable[[str], None]
) -> TfliteFile:
    """Read and convert a file.

    Parameters
    ----------
    path
        The file.
    input_shapes
        Input name -> shape, for inputs that shall have another shape than in the file.
    progress
        Called with each choice that was made without asking the user.

    Raises
    ------
    ModelError
        If the file cannot be read or converted.
    ShapeError
        If `input_shapes` does not fit the inputs.
    ParityError
        If LiteRT is installed and gives other numbers.
    """
    raw = read_bytes(path)
    model = read(raw, str(path))
    converted = convert(model, path.stem, input_shapes, progress)
    compare(raw, model, converted, progress)
    declared = read_metadata(raw, model)
    if input_shapes:
        declared = replace(declared, preprocess=None)  # it is for pictures of the file's own size
    if (text := describe(declared)) is not None:
        progress(text)
    return TfliteFile(converted, hashlib.sha256(raw).hexdigest(), declared)
