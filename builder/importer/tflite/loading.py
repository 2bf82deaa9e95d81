"""From a `.tflite` file to the ONNX model that the importer takes: read, convert, compare with LiteRT."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from numpy.typing import ArrayLike

from agent.bundle.state import State
from builder.importer.edge_scales import EdgeScales
from builder.importer.model_file import read_bytes
from builder.importer.tflite.comparison import compare, is_installed
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.metadata import Declared, class_counts_of, describe, read_metadata, scales_of
from builder.importer.tflite.schema import read


@dataclass(frozen=True, slots=True)
class TfliteFile:
    """A converted file.

    `class_counts`: outputs that are numbers of classes -> how many classes there are.
    `notes`: choices made without asking the user; one line each.
    """

    model: onnx.ModelProto
    states: tuple[State, ...]
    sha256: str
    declared: Declared
    scales: EdgeScales
    class_counts: Mapping[str, int]
    notes: tuple[str, ...]


def load_tflite(
    path: Path,
    input_shapes: Mapping[str, Sequence[int]] | None,
    input_values: Mapping[str, ArrayLike] | None,
    progress: Callable[[str], None],
) -> TfliteFile:
    """Read and convert a file.

    `input_shapes`: input name -> shape, for inputs that shall have another shape than in the file.
    `input_values`: input name -> value, for inputs that shall be constants. They stay inputs of the ONNX
        model, which nothing reads.
    Raises `ModelError` if the file cannot be read or converted.
    Raises `ParityError` if LiteRT is installed and gives other numbers.
    """
    raw = read_bytes(path)
    model = read(raw, str(path))
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        progress(text)

    converted = convert(model, path.stem, input_shapes, note, input_values=input_values)
    if is_installed():
        progress("comparing the import with LiteRT")
    compare(raw, model, converted, note)
    declared = read_metadata(raw, model)
    own = declared.preprocess
    if own is not None and own.resize is not None:
        shape = (1, *own.resize, 1 if own.colour == "GRAY" else 3)
        if tuple((input_shapes or {}).get(own.input, shape)) != shape:
            declared = replace(declared, preprocess=None)  # it is for pictures of the file's own size
    if (text := describe(declared)) is not None:
        note(text)
    return TfliteFile(
        converted.model,
        converted.states,
        hashlib.sha256(raw).hexdigest(),
        declared,
        scales_of(model),
        class_counts_of(model),
        tuple(notes),
    )
