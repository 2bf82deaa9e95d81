"""A model file, read safely.

Promises a decoded model whose weights are all in memory, within limits, and from nowhere but the model's own
folder. Whether the graph makes sense is checked elsewhere (`structure`).
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from onnx.external_data_helper import load_external_data_for_tensor, uses_external_data

from builder.errors import ModelError

# A protobuf message ends at 2 GiB; every tool that works on the model holds it as one, shapes and all.
MAX_MODEL_BYTES: Final = (1 << 31) - (1 << 20)

_BEGINNINGS: Final = {
    b"version https://git-lfs": "it is a Git LFS pointer: fetch the file itself with git lfs pull",
    b"PK\x03\x04": "it is a zip archive, as PyTorch and Keras save them: export the model to ONNX",
    b"\x89HDF": "it is an HDF5 file: export the model to ONNX with tf2onnx",
    b"<!DOCTYPE": "it is a web page: download the file itself",
    b"<html": "it is a web page: download the file itself",
}
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
# Fields whose strings nobody looks up: exporters put stack traces and whole configuration files there.
_FREE_TEXT: Final = frozenset({"doc_string", "value", "producer_name", "producer_version"})
_EXPORT_HINT: Final = "download or export the model again"
_SUFFIXES: Final = frozenset({".onnx", ".pt2"})
_LISTED: Final = 6  # models that a hint names


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A decoded model.

    Attributes
    ----------
    model
        The model; no tensor of it is external any more.
    sha256
        Digest, in hexadecimal, of the file; where weights stood in files of their own, of the digests of all
        files, the model's first and the others in the order of their names.
    """

    model: onnx.ModelProto
    sha256: str


def read_model(path: Path | str) -> ModelFile:
    """Read an ONNX file and the weights beside it.

    Raises
    ------
    ModelError
        If there is no such file, it is too large, is no ONNX file, or names weights outside its folder.
    """
    path = Path(path)
    raw = _read(path)
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
    """Digest of a model file that another library will read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def decode(raw: bytes, source: str) -> onnx.ModelProto:
    """Decode a model; `source` says in messages where it came from."""
    hint = next((text for start, text in _BEGINNINGS.items() if raw.startswith(start)), _EXPORT_HINT)
    if not raw:
        raise ModelError(f"expected an ONNX model, got an empty file: {source}", hint=_EXPORT_HINT)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError as error:
        raise ModelError(f"not an ONNX model, or a part of one: {source}", hint=hint) from error
    if not _are_names_text(model):
        raise ModelError(
            f"not an ONNX model, or a damaged one: a name in it is not text: {source}", hint=hint
        )
    if not model.HasField("graph") or not model.opset_import or not model.graph.output:
        raise ModelError(f"expected an ONNX model with a graph, outputs and an opset: {source}", hint=hint)
    return model


def _are_names_text(message: Message) -> bool:
    """Whether every name is UTF-8 without control characters.

    Protobuf lets other bytes pass, and libraries trip over them; a line break would forge lines of our
    messages.
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


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(
                    f"expected an ONNX file, got something that is no regular file: {path}", hint=_EXPORT_HINT
                )
            if status.st_size > MAX_MODEL_BYTES:
                raise ModelError(
                    f"expected a model of at most {MAX_MODEL_BYTES} bytes, got {status.st_size}: {path}",
                    hint="larger models do not fit the devices this is for; quantise or prune it",
                )
            return stream.read(MAX_MODEL_BYTES)
    except FileNotFoundError as error:
        raise ModelError(
            f"expected a model, found no such file: {path}", hint=_models_in(path.parent)
        ) from error
    except IsADirectoryError as error:
        raise ModelError(f"expected an ONNX file, got a folder: {path}", hint=_models_in(path)) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


def _models_in(folder: Path) -> str:
    """Name the models of a folder, for someone who mistyped one."""
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix in _SUFFIXES)
    except OSError:
        names = []
    if not names:
        return _EXPORT_HINT
    return f"in {folder}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"


def tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model: weights, those of subgraphs and functions, and those in attributes."""
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
    """Files that hold weights; each lies in the model's folder, and together they are small enough."""
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
                f"weight '{tensor.name}' expects bytes {offset} to {offset + length} of {file.name}, "
                f"which has {size}",
                hint=_EXPORT_HINT,
            )
        total += length
        if total > MAX_MODEL_BYTES:
            raise ModelError(
                f"expected at most {MAX_MODEL_BYTES} bytes of weights, got more: {source}",
                hint="larger models do not fit the devices this is for; quantise or prune it",
            )
        found.add(file)
    return sorted(found)


def _confined(location: str, folder: Path, name: str, source: Path) -> Path:
    pure = PurePosixPath(location)
    if not location or pure.is_absolute() or ".." in pure.parts or "\\" in location or "\0" in location:
        raise ModelError(
            f"weight '{name}' of {source} expects a file in the model's own folder, got {location!r:.80}"
        )
    file = (folder / location).resolve()
    if not file.is_relative_to(folder):
        raise ModelError(
            f"weight '{name}' of {source} lies outside the model's folder, through a link: {location}"
        )
    if not file.is_file():
        raise ModelError(
            f"weight '{name}' of {source} expects the file {location} beside the model, which is not there",
            hint="copy the weights' file along with the model",
        )
    return file


def _count(text: str, key: str, name: str) -> int | None:
    if not text:
        return None
    # 19 digits and no sign: at most 2**63, so that the sum below stays exact and small.
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        raise ModelError(f"weight '{name}' expects a number as the {key} of its data, got {text!r:.40}")
    return int(text)


def _load_external(model: onnx.ModelProto, folder: Path, source: Path) -> None:
    for tensor in tensors(model):
        if not uses_external_data(tensor):
            continue
        try:
            load_external_data_for_tensor(tensor, str(folder))
        except (OSError, ValueError, onnx.checker.ValidationError) as error:
            reason = str(error).splitlines()[0]
            raise ModelError(f"cannot read weight '{tensor.name}' of {source}: {reason}") from error
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]
