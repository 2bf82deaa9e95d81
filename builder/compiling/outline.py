"""What a model file says about its own tensors, before the compiler is loaded.

Promises an answer in well under a second, or None: mistakes in declarations can then be told at once. What
the file does not say (symbolic shapes, PyTorch exports, damaged files) is left to the importer, which checks
all of it again and has the better messages.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from google.protobuf.message import DecodeError

from agent.bundle.tensor_spec import TensorSpec

# Larger files take seconds to read.
MAX_OUTLINED_BYTES: Final = 256 << 20
_MAX_NAMES: Final = 100_000
_MAX_NAMES_CHARACTERS: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Outline:
    """A model's tensors.

    Attributes
    ----------
    inputs, outputs
        Their names, datatypes and shapes; a symbolic batch counts as 1.
    labels
        The class names that exports of Ultralytics carry; empty for others.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...] = ()


def read_outline(path: str | Path) -> Outline | None:
    """Read a model's tensors from an ONNX file, or return None if they are not all known."""
    path = Path(path)
    try:
        if path.suffix.lower() != ".onnx" or path.stat().st_size > MAX_OUTLINED_BYTES:
            return None
        model = onnx.load(str(path), load_external_data=False)
    except (OSError, DecodeError, ValueError):
        return None
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [_spec(value) for value in graph.input if value.name not in weights]
    outputs = [_spec(value) for value in graph.output]
    known = [spec for spec in (*inputs, *outputs) if spec is not None]
    if len(known) != len(inputs) + len(outputs) or not inputs or not outputs:
        return None
    return Outline(tuple(known[: len(inputs)]), tuple(known[len(inputs) :]), exported_labels(model))


def tensor_names(path: str | Path) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Read the names of a model's inputs and outputs from an ONNX file; None if it is not one or damaged."""
    path = Path(path)
    try:
        if path.suffix.lower() != ".onnx" or path.stat().st_size > MAX_OUTLINED_BYTES:
            return None
        graph = onnx.load(str(path), load_external_data=False).graph
    except (OSError, DecodeError, ValueError):
        return None
    weights = {tensor.name for tensor in graph.initializer}
    inputs = tuple(value.name for value in graph.input if value.name not in weights)
    return inputs, tuple(value.name for value in graph.output)


def exported_labels(model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the class names that Ultralytics' exports carry in their metadata; none if there are none.

    Parameters
    ----------
    model
        The model. Its metadata `names` is a Python dictionary such as `{0: 'person', 1: 'bicycle'}`.
    """
    text = next((prop.value for prop in model.metadata_props if prop.key == "names"), "")
    if not 0 < len(text) <= _MAX_NAMES_CHARACTERS:
        return ()
    try:
        names = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return ()
    if not isinstance(names, dict) or not 0 < len(names) <= _MAX_NAMES:
        return ()
    found = [names.get(index) for index in range(len(names))]
    words = [" ".join(name.split()) if isinstance(name, str) else "" for name in found]
    return tuple(words) if all(name and name.isprintable() for name in words) else ()


def _spec(value: onnx.ValueInfoProto) -> TensorSpec | None:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    shape = _shape(tensor.shape.dim)
    if shape is None:
        return None
    try:
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        return TensorSpec.from_dtype(value.name, str(dtype), shape)
    except (KeyError, TypeError, ValueError):
        return None


def _shape(dims: Sequence[onnx.TensorShapeProto.Dimension]) -> tuple[int, ...] | None:
    shape = []
    for index, dim in enumerate(dims):
        if dim.HasField("dim_value") and dim.dim_value > 0:
            shape.append(dim.dim_value)
        elif index == 0:
            shape.append(1)
        else:
            return None
    return tuple(shape)
