"""Read a model file safely.

Promises a decoded model with all its weights in memory. Sizes are limited, and weights are read only from the
model's own folder. Leaves checking the graph to `structure`.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from agent.reading import open_at_once
from builder.errors import ModelError, lines_of
from builder.importer.large_models import MAX_WEIGHT_BYTES
from builder.importer.model_path import EXPORT_HINT, models_in
from builder.importer.other_files import recognise
from builder.spelling import READABLE

_BESIDE: Final = "save the model again, with its weights inside it or beside it"

# A protobuf message is limited to 2 GiB. External weights may have more in total.
MAX_MODEL_BYTES: Final = (1 << 31) - (1 << 20)

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
# Fields that are never used as names: exporters put stack traces and whole configuration files there.
_FREE_TEXT: Final = frozenset({"doc_string", "value", "producer_name", "producer_version"})


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A decoded model.

    `model`: the model, with external tensors loaded.
    `sha256`: SHA-256 of the file, in hexadecimal. With external weights, it is the digest of all files'
        digests, the model's first and the others sorted by name.
    """

    model: onnx.ModelProto
    sha256: str


def read_model(path: Path | str) -> ModelFile:
    """Read an ONNX file and the weights beside it.

    Raises `ModelError` if the file does not exist, is too large, is not an ONNX file, or names weights
        outside its folder.
    """
    path = Path(path)
    raw = read_bytes(path)
    model = decode(raw, str(path))
    digests = [hashlib.sha256(raw).hexdigest()]
    del raw
    folder = path.parent.resolve()
    files = _external_files(model, folder, path)
    for file in files:
        with file.open("rb") as stream:
            digests.append(hashlib.file_digest(stream, "sha256").hexdigest())
    if files:
        _load_external(model, folder, path)
        return ModelFile(model, hashlib.sha256("\n".join(digests).encode()).hexdigest())
    return ModelFile(model, digests[0])


def file_sha256(path: Path) -> str:
    """SHA-256, in hexadecimal, of a model file that another library will read.

    Raises `ModelError` if the file cannot be read, is too large or is not a regular file.
    """
    try:
        with _opened(path) as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=READABLE) from error


def decode(raw: bytes, source: str) -> onnx.ModelProto:
    """Decode a model."""
    if not raw:
        raise ModelError(f"expected an ONNX model, got an empty file: {source}", hint=EXPORT_HINT)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        other = recognise(raw, source)
        raise ModelError(f"expected an ONNX model, got {other.what}: {source}", hint=other.hint) from error
    check_message(model, source, recognise(raw, source).hint)
    return model


def check_message(model: onnx.ModelProto, source: str, hint: str = EXPORT_HINT) -> None:
    """Check that a message has what a model has.

    Raises `ModelError` if something is missing, or a name is not text.
    """
    if not _are_names_text(model):
        raise ModelError(f"expected an ONNX model, got one with a name that is not text: {source}", hint=hint)
    if not model.HasField("graph") or not model.opset_import or not model.graph.output:
        raise ModelError(
            f"expected an ONNX model with a graph, outputs and an opset, got an incomplete one: {source}",
            hint=hint,
        )


def _are_names_text(message: Message) -> bool:
    """Whether every name is UTF-8 without control characters.

    Protobuf accepts other bytes, but libraries fail on them, and a line break could forge an error message.
    """
    if isinstance(message, onnx.TensorProto):
        return _is_name(message.name) and all(_are_names_text(entry) for entry in message.external_data)
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.type == FieldDescriptor.TYPE_STRING:
            check = _is_string if field.name in _FREE_TEXT else _is_name
            if not all(check(item) for item in values):
                return False
        elif field.type == FieldDescriptor.TYPE_MESSAGE and not all(_are_names_text(item) for item in values):
            return False
    return True


def _is_string(text: str | bytes) -> bool:
    return isinstance(text, str)


def _is_name(text: str | bytes) -> bool:
    return isinstance(text, str) and not _CONTROL.search(text)


def read_bytes(path: Path) -> bytes:
    """Read a whole model file of at most `MAX_MODEL_BYTES`.

    Raises `ModelError` if it does not exist, is too large or is not a regular file.
    """
    try:
        with _opened(path) as stream:
            return stream.read(MAX_MODEL_BYTES)
    except FileNotFoundError as error:
        raise ModelError(f"no such file: {path}", hint=models_in(path.parent, path.name)) from error
    except IsADirectoryError as error:
        raise ModelError(f"expected a model file, got a folder: {path}", hint=models_in(path)) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}", hint=READABLE) from error


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file of at most `MAX_MODEL_BYTES`."""
    with os.fdopen(open_at_once(path), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"expected a regular file, got a device or a pipe: {path}", hint=EXPORT_HINT)
        if status.st_size > MAX_MODEL_BYTES:
            raise ModelError(
                f"expected a model of at most {MAX_MODEL_BYTES} bytes, got {status.st_size}: {path}",
                hint="quantise or prune the model: larger ones do not fit the supported devices",
            )
        yield stream


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, its subgraphs and its functions: weights and tensors in attributes."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    for attribute in node.attribute:
        yield attribute.t
        yield from attribute.tensors
        for graph in (attribute.g, *attribute.graphs):
            yield from _graph_tensors(graph)


def _external_files(model: onnx.ModelProto, folder: Path, source: Path) -> list[Path]:
    """The files that hold weights: each is in the model's folder, and together they are within the limit."""
    found: set[Path] = set()
    total = 0
    for tensor in tensors(model):
        if not uses_external_data(tensor):
            continue
        entries = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        file = _confined(location, folder, tensor.name, source)
        size = file.stat().st_size
        offset, length = (_count(entries.get(key, ""), key, tensor.name) for key in ("offset", "length"))
        offset = offset or 0
        length = max(size - offset, 0) if length is None else length
        if offset + length > size:
            raise ModelError(
                f"weight '{tensor.name}': expected bytes {offset} to {offset + length} of {file.name}, "
                f"got a file of {size} bytes",
                hint=EXPORT_HINT,
            )
        total += length
        # The whole file is hashed, so it must not be larger either.
        if max(total, size) > MAX_WEIGHT_BYTES or length > MAX_MODEL_BYTES:
            raise ModelError(
                f"expected at most {MAX_WEIGHT_BYTES} bytes of weights, and {MAX_MODEL_BYTES} in each one, "
                f"got more: {source}",
                hint="quantise or prune the model: larger ones do not fit the supported devices",
            )
        found.add(file)
    return sorted(found)


def _confined(location: str, folder: Path, name: str, source: Path) -> Path:
    pure = PurePosixPath(location)
    if not location or pure.is_absolute() or ".." in pure.parts or "\\" in location or "\0" in location:
        raise ModelError(
            f"weight '{name}' of {source}: expected a file in the model's own folder, got {location!r:.80}",
            hint=_BESIDE,
        )
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise ModelError(
            f"weight '{name}' of {source}: expected a file in the model's own folder, "
            f"got a link out of it: {location}",
            hint=_BESIDE,
        )
    if not file.is_file():
        raise ModelError(
            f"weight '{name}' of {source}: expected the file {location} beside the model, got no such file",
            hint="copy the weights file along with the model",
        )
    return file


def _count(text: str, key: str, name: str) -> int | None:
    if not text:
        return None
    # At most 19 digits and no sign: no file offset has more.
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ModelError(
            f"weight '{name}': expected a number as the {key} of its data, got {text!r:.40}", hint=EXPORT_HINT
        )
    return int(text)


def _load_external(model: onnx.ModelProto, folder: Path, source: Path) -> None:
    for tensor in tensors(model):
        if not uses_external_data(tensor):
            continue
        try:
            load_external_data_for_tensor(tensor, str(folder))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            reason = lines_of(error)[0]
            raise ModelError(
                f"cannot read weight '{tensor.name}' of {source}: {reason}",
                hint="copy the file with the weights beside the model, or export both again",
            ) from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
