"""Read what a TFLite file says about its pictures and classes: normalisation, labels, the unit of boxes.

Converters attach it as the piece of metadata `TFLITE_METADATA`, a FlatBuffer of its own
(tensorflow_lite_support/metadata/metadata_schema.fbs, version 1.1.0), and append files such as labels as a
zip archive. Promises values within range, or none: metadata never makes a model unusable. The classes for
this schema come only with a far larger package, so the few fields are read here by their numbers.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import flatbuffers
import numpy as np
from flatbuffers import number_types

from agent.bundle.archive import MAX_MEMBER_BYTES
from agent.bundle.processing import Preprocess
from builder.importer.edge_scales import EdgeScales, tflite_scales
from builder.importer.tflite.operators.detection import POST_PROCESS, class_count
from builder.importer.tflite.schema import MALFORMED, Operator, Subgraph, TfliteModel
from builder.importer.tflite.tensor import Tensor, value_name
from builder.importer.ultralytics_metadata import NOTHING_SAID, Exported, from_archive

NAME: Final = "TFLITE_METADATA"
IDENTIFIER: Final = b"M001"
MAX_LABELS_BYTES: Final = MAX_MEMBER_BYTES["labels.txt"]
# Models have a few inputs and outputs, with a few files and steps each.
_MAX_ENTRIES: Final = 64
_MAX_NAME_BYTES: Final = 256
# Numbers of fields, in the order of the schema's tables.
_SUBGRAPHS: Final = 3
_INPUTS, _OUTPUTS = 2, 3
_CONTENT, _PROCESS_UNITS, _FILES = 3, 4, 6
_UNION_TYPE, _UNION = 0, 1
_NORMALIZATION: Final = 1  # ProcessUnitOptions
_IMAGE: Final = 2  # ContentProperties
_GRAYSCALE: Final = 2  # ColorSpaceType
_AXIS_LABELS, _VALUE_LABELS = 2, 3  # AssociatedFileType
# Outputs of TFLite_Detection_PostProcess.
_DETECTIONS: Final = ("boxes", "classes", "scores", "count")
# Operators that only move values or change their datatype, and the most of them behind the one that computes.
_MOVES: Final = frozenset({"CAST", "DEQUANTIZE", "QUANTIZE", "RESHAPE", "SQUEEZE", "TRANSPOSE"})
_MOST_MOVES: Final = 16
_ZIP_FAILURES: Final = (
    *MALFORMED,
    OSError,
    RuntimeError,
    NotImplementedError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Declared:
    """What a file declares.

    `preprocess`: how a picture becomes the input, or None.
    `labels`: labels of the classes, in the order of the last axis of the only output, or of the numbers of
        classes that an output has; empty if there are none.
    `exported`: what an export of Ultralytics says about itself.
    `normalised`: whether boxes are fractions of the picture; None if the file does not say.
    """

    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    exported: Exported = NOTHING_SAID
    normalised: bool | None = None


class _Table:
    """A table of a FlatBuffer, read by the numbers of its fields."""

    def __init__(self, raw: bytes, position: int) -> None:
        self._raw = raw
        self._table = flatbuffers.table.Table(raw, position)

    def _offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def byte(self, field: int) -> int:
        offset = self._offset(field)
        return int(self._table.Get(number_types.Uint8Flags, offset + self._table.Pos)) if offset else 0

    def table(self, field: int) -> _Table | None:
        offset = self._offset(field)
        return _Table(self._raw, self._table.Indirect(offset + self._table.Pos)) if offset else None

    def tables(self, field: int) -> list[_Table]:
        offset = self._offset(field)
        if not offset:
            return []
        start, count = self._table.Vector(offset), min(self._table.VectorLen(offset), _MAX_ENTRIES)
        return [_Table(self._raw, self._table.Indirect(start + 4 * i)) for i in range(count)]

    def floats(self, field: int) -> tuple[float, ...]:
        offset = self._offset(field)
        if not offset or self._table.VectorLen(offset) > _MAX_ENTRIES:
            return ()
        found = np.asarray(self._table.GetVectorAsNumpy(number_types.Float32Flags, offset))
        return tuple(float(value) for value in found)

    def text(self, field: int) -> str:
        offset = self._offset(field)
        if not offset or self._table.VectorLen(offset) > _MAX_NAME_BYTES:
            return ""
        return str(self._table.String(offset + self._table.Pos).decode("utf-8", errors="replace"))


def read_metadata(raw: bytes, model: TfliteModel) -> Declared:
    """Read a file's metadata.

    Parameters
    ----------
    raw
        The file's content.
    model
        The decoded file.

    Returns
    -------
    Declared
        What can be used; nothing if the metadata is missing or damaged.
    """
    declared = _read_own(raw, model)
    said = from_archive(raw)
    if said is None:
        return declared
    # Ultralytics writes boxes as fractions, so that they share a scale with the scores, except those that a
    # model in NCHW has chosen itself.
    channels_last = any(graph_input.shape[-1:] == (3,) for graph_input in _inputs(model))
    is_fraction = True if channels_last or not said.is_final else None
    labels = said.labels or declared.labels
    return replace(declared, labels=labels, exported=said, normalised=is_fraction)


def _inputs(model: TfliteModel) -> list[Tensor]:
    graph = model.subgraphs[0]
    return [graph.tensors[index] for index in graph.inputs]


def _read_own(raw: bytes, model: TfliteModel) -> Declared:
    content = next((content for name, content in model.metadata if name == NAME), b"")
    if content[4:8] != IDENTIFIER:
        return Declared()
    try:
        root = _Table(content, struct.unpack_from("<I", content)[0])
        [main] = root.tables(_SUBGRAPHS)[:1]
        graph = model.subgraphs[0]
        outputs = [graph.tensors[index] for index in graph.outputs]
        preprocess = _preprocess(_inputs(model), main.tables(_INPUTS))
        return Declared(preprocess, _labels(raw, outputs, main.tables(_OUTPUTS)))
    except MALFORMED:
        return Declared()


def _preprocess(inputs: list[Tensor], described: list[_Table]) -> Preprocess | None:
    """The normalisation of the only input that is a picture.

    An input of uint8 gets the bytes themselves, as TensorFlow's own libraries give them: there the metadata
    have what was done in training, whether or not the input's scale is that of the same numbers.
    """
    found = [
        (tensor, table)
        for tensor, table in zip(inputs, described, strict=False)
        if len(tensor.shape) == 4 and tensor.shape[0] == 1 and tensor.shape[3] in (1, 3)
    ]
    if len(found) != 1:
        return None
    tensor, table = found[0]
    steps = [
        unit.table(_UNION)
        for unit in table.tables(_PROCESS_UNITS)
        if unit.byte(_UNION_TYPE) == _NORMALIZATION
    ]
    if len(steps) != 1 or steps[0] is None:
        return None
    mean, std = np.asarray(steps[0].floats(0), np.float64), np.asarray(steps[0].floats(1), np.float64)
    if not mean.size or not std.size or not (np.abs(std) > 0).all():
        return None
    if tensor.dtype == "uint8":
        mean, std = np.zeros(1), np.ones(1)
    content = table.table(_CONTENT)
    picture = content.table(_UNION) if content is not None and content.byte(_UNION_TYPE) == _IMAGE else None
    is_grey = tensor.shape[3] == 1
    if picture is not None and (picture.byte(0) == _GRAYSCALE) != is_grey:
        return None
    return Preprocess(
        input=value_name(tensor),
        colour="GRAY" if is_grey else "RGB",
        resize=(tensor.shape[1], tensor.shape[2]),
        resize_mode="stretch",
        interpolation="bilinear",
        crop=None,
        scale=1.0,
        mean=tuple(float(value) for value in mean),
        std=tuple(float(value) for value in std),
        layout="NHWC",
    )


def _labels(raw: bytes, outputs: list[Tensor], described: list[_Table]) -> tuple[str, ...]:
    """The labels of the only output's last axis, or those of the only output of class numbers."""
    is_only = len(outputs) == len(described) == 1 and bool(outputs[0].shape)
    kind = _AXIS_LABELS if is_only else _VALUE_LABELS
    names = [file.text(0) for each in described for file in each.tables(_FILES) if file.byte(2) == kind]
    # A file for each language may follow.
    if not names:
        return ()
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive, archive.open(names[0]) as stream:
            content = stream.read(MAX_LABELS_BYTES + 1)
        if len(content) > MAX_LABELS_BYTES:
            return ()
        labels = content.decode("utf-8-sig").splitlines()
    except _ZIP_FAILURES:
        return ()
    while labels and not labels[-1].strip():
        labels.pop()
    fits = len(labels) == outputs[0].shape[-1] if is_only else bool(labels)
    return tuple(label.strip() or " " for label in labels) if fits else ()


def describe(declared: Declared) -> str | None:
    """What the user should know, in one line; None if there is nothing."""
    parts: list[Any] = []
    if declared.preprocess is not None:
        parts.append("how pictures are prepared")
    if declared.labels:
        parts.append(f"{len(declared.labels)} labels")
    if declared.normalised:
        parts.append("boxes as fractions of the picture")
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
    return f"from the file's metadata: {listed}" if parts else None


def scales_of(model: TfliteModel) -> EdgeScales:
    """Return the scales of a file's quantised inputs and outputs."""
    main = model.subgraphs[0]
    named = [
        [(value_name(main.tensors[index]), main.tensors[index]) for index in each]
        for each in (main.inputs, main.outputs)
    ]
    return tflite_scales(*named)


def steps_of(model: TfliteModel) -> dict[str, float]:
    """Return what one step of each output stands for, also of real numbers that were integers before."""
    found = {}
    for name, tensors, _ in _origins(model.subgraphs[0]):
        quantisation = next((each.quantisation for each in tensors if each.is_quantised), None)
        if quantisation is not None and not quantisation.is_per_axis:
            found[name] = float(quantisation.scales[0])
    return found


def makers_of(model: TfliteModel) -> dict[str, tuple[Operator, int]]:
    """Return which operator computes the values of each output, and which of its outputs they are.

    Operators that only move values, or change their datatype, do not count.
    """
    return {name: made for name, _, made in _origins(model.subgraphs[0]) if made is not None}


def _origins(graph: Subgraph) -> Iterator[tuple[str, list[Tensor], tuple[Operator, int] | None]]:
    """Yield each output's name, itself and the tensors that it was moved from, and what made the last one."""
    makers = {
        tensor: (operator, place)
        for operator in graph.operators
        for place, tensor in enumerate(operator.outputs)
    }
    for output in graph.outputs:
        made, indices = makers.get(output), [output]
        while made is not None and len(indices) <= _MOST_MOVES and made[0].name in _MOVES and made[0].inputs:
            indices.append(made[0].inputs[0])
            made = makers.get(indices[-1])
        yield value_name(graph.tensors[output]), [graph.tensors[index] for index in indices], made


def detections_of(model: TfliteModel) -> dict[str, str]:
    """Return what outputs of a TFLite_Detection_PostProcess have: `boxes`, `classes`, `scores`, `count`."""
    return {
        name: _DETECTIONS[place]
        for name, (operator, place) in makers_of(model).items()
        if operator.name == POST_PROCESS and len(operator.outputs) == len(_DETECTIONS)
    }


def class_counts_of(model: TfliteModel) -> dict[str, int]:
    """Return how many classes there are, for each output that is numbers of classes."""
    roles, makers = detections_of(model), makers_of(model)
    return {name: class_count(makers[name][0].custom) for name in roles if roles[name] == "classes"}
