"""Normalisation and labels that a file brings along become the bundle's, unless the user gives others."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest

from builder import Options, compile, load
from builder.importer.tflite.metadata import Declared, describe, read_metadata, steps_of
from builder.importer.tflite.schema import read
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

LABELS = "cat\ndog\nGänse\n\n"


def table(b: Any, *fields: tuple[int, str, Any]) -> int:
    """Write a table: number, kind and value of each field."""
    b.StartObject(8)
    for number, kind, value in fields:
        if kind == "byte":
            b.PrependUint8Slot(number, value, 0)
        else:
            b.PrependUOffsetTRelativeSlot(number, value, 0)
    return int(b.EndObject())


def vector(b: Any, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return int(b.EndVector())


def metadata(
    mean: Sequence[float], std: Sequence[float], *, space: int = 1, file: str = "labels.txt"
) -> bytes:
    b = flatbuffers.Builder(256)
    numbers = [b.CreateNumpyVector(np.asarray(values, np.float32)) for values in (mean, std)]
    normalisation = table(b, (0, "offset", numbers[0]), (1, "offset", numbers[1]))
    units = vector(b, [table(b, (0, "byte", 1), (1, "offset", normalisation))])
    picture = table(b, (0, "byte", space))
    content = table(b, (0, "byte", 2), (1, "offset", picture))
    first = table(b, (3, "offset", content), (4, "offset", units))
    name = b.CreateString(file)
    files = vector(b, [table(b, (0, "offset", name), (2, "byte", 2))])
    last = table(b, (6, "offset", files))
    inputs, outputs = vector(b, [first]), vector(b, [last])
    main = vector(b, [table(b, (2, "offset", inputs), (3, "offset", outputs))])
    root = table(b, (3, "offset", main))
    b.Finish(root, b"M001")
    return bytes(b.Output())


def classifier(
    content: bytes, dtype: str = "float32", labels: str | None = LABELS, channels: int = 3
) -> bytes:
    """A file whose input is a picture and whose output has three classes."""
    graph = FileSubgraph()
    scales: dict[str, Any] = {} if dtype == "float32" else {"scales": [0.5], "zeros": [3]}
    graph.inputs = [graph.tensor((1, 4, 6, channels), dtype, name="picture", **scales)]
    flat, mean = graph.tensor((), dtype, **scales), graph.tensor((1, 3), dtype, **scales)
    graph.op("MEAN", [0, graph.constant([1, 2])], [flat], "ReducerOptions")
    if channels == 1:
        graph.op("CONCATENATION", [flat] * 3, [mean], "ConcatenationOptions", Axis=1)
    else:
        graph.op("RESHAPE", [flat, graph.constant([1, 3])], [mean])
    graph.outputs = [mean]
    raw = write(graph, metadata={"TFLITE_METADATA": content})
    if labels is None:
        return raw
    appended = io.BytesIO()
    with zipfile.ZipFile(appended, "w") as archive:
        archive.writestr("labels.txt", labels)
    return raw + appended.getvalue()


def detector(names: Sequence[str]) -> bytes:
    """A file with boxes and numbers of classes, which have a file of labels."""
    b = flatbuffers.Builder(256)
    files = vector(b, [table(b, (0, "offset", b.CreateString("labels.txt")), (2, "byte", 3))])
    plain, named = table(b), table(b, (6, "offset", files))
    main = vector(b, [table(b, (3, "offset", vector(b, [plain, named])))])
    b.Finish(table(b, (3, "offset", main)), b"M001")
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 8), name="x")]
    graph.outputs = [graph.tensor((1, 2, 4)), graph.tensor((1, 8))]
    graph.op("RESHAPE", [0, graph.constant([1, 2, 4])], [1])
    graph.op("RESHAPE", [0, graph.constant([1, 8])], [2])
    file = io.BytesIO(write(graph, metadata={"TFLITE_METADATA": bytes(b.Output())}))
    file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("labels.txt", "\n".join(names))
    return file.getvalue()


def declared(raw: bytes) -> Declared:
    return read_metadata(raw, read(raw, "file"))


def test_a_float_model() -> None:
    found = declared(classifier(metadata([127.5], [127.5])))
    assert found.labels == ("cat", "dog", "Gänse")
    assert found.preprocess is not None
    assert (found.preprocess.input, found.preprocess.resize) == ("picture", (4, 6))
    assert (found.preprocess.colour, found.preprocess.layout) == ("RGB", "NHWC")
    assert (found.preprocess.mean, found.preprocess.std) == ((127.5,), (127.5,))


def test_a_quantised_model_has_real_numbers_too() -> None:
    found = declared(classifier(metadata([100, 110, 120], [50]), "int8")).preprocess
    assert found is not None
    assert (found.mean, found.std) == ((100, 110, 120), (50,))


def test_an_input_of_uint8_gets_the_bytes_as_tensorflow_gives_them() -> None:
    found = declared(classifier(metadata([127.5], [127.5]), "uint8")).preprocess
    assert found is not None
    assert (found.mean, found.std, found.scale) == ((0,), (1,), 1)


def test_a_grey_model() -> None:
    found = declared(classifier(metadata([0], [255], space=2), channels=1)).preprocess
    assert found is not None and found.colour == "GRAY"
    assert declared(classifier(metadata([0], [255], space=1), channels=1)).preprocess is None


@pytest.mark.parametrize(
    ("mean", "std"), [([0], [0]), ([float("nan")], [1]), ([1, 2], [1]), ([], [1]), ([0], [])]
)
def test_numbers_that_cannot_be_used(mean: list[float], std: list[float]) -> None:
    assert declared(classifier(metadata(mean, std))).preprocess is None


def test_a_byte_order_mark_is_no_part_of_a_label() -> None:
    assert declared(classifier(metadata([0], [1]), labels="\ufeffcat\ndog\nGänse\n")).labels[0] == "cat"


@pytest.mark.parametrize("labels", [None, "cat\ndog\n", "a\nb\nc\nd\n", "", "x" * (2 << 20)])
def test_labels_that_do_not_fit(labels: str | None) -> None:
    assert declared(classifier(metadata([0], [1]), labels=labels)).labels == ()


def test_a_file_without_metadata() -> None:
    assert declared(classifier(b"")) == Declared()
    assert declared(classifier(b"\x08\0\0\0NONE")) == Declared()


def test_damaged_metadata_is_left_out() -> None:
    rng = random.Random(7)
    whole = metadata([127.5], [127.5])
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.choice((1, 2, 6))):
            content[rng.randrange(len(content))] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        declared(classifier(bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])))
    cut = classifier(whole)
    for end in range(1, 100, 7):
        declared(cut[:-end])


def test_a_bundle_takes_them_over(tmp_path: Path) -> None:
    path = tmp_path / "classifier.tflite"
    path.write_bytes(classifier(metadata([127.5], [127.5])))
    model = load(path)
    assert model.notes == ("from the file's metadata: how pictures are prepared and 3 labels",)
    package = compile(model)
    assert package.manifest.preprocess == model.preprocess
    assert package.members["labels.txt"].decode() == "cat\ndog\nGänse\n"
    other = compile(model, options=Options(preprocess="unit")).manifest.preprocess
    assert other is not None and other.scale == 1 / 255


def test_another_shape_has_no_pictures(tmp_path: Path) -> None:
    path = tmp_path / "classifier.tflite"
    path.write_bytes(classifier(metadata([127.5], [127.5])))
    assert load(path, input_shapes={"picture": (1, 8, 6, 3)}).preprocess is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bounds", "sizes", "has_pictures"), [("1..2,4,6,3", "1,2", True), ("1,4..5,6,3", "4,5", False)]
)
def test_bounds_of_the_batch_leave_it_its_pictures(
    tmp_path: Path, bounds: str, sizes: str, *, has_pictures: bool
) -> None:
    path = tmp_path / "classifier.tflite"
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 4, 6, 3), name="picture")]
    graph.outputs = [graph.tensor((1, 3))]
    graph.op("MEAN", [0, graph.constant([1, 2])], graph.outputs, "ReducerOptions")
    path.write_bytes(write(graph, metadata={"TFLITE_METADATA": metadata([127.5], [127.5])}))
    options = Options(input_shapes=f"picture:[{bounds}]", buckets=sizes)
    manifest = compile(path, options=options).manifest
    assert manifest.preprocess == (load(path).preprocess if has_pictures else None)


def exported(shape: tuple[int, ...], **more: Any) -> Declared:
    """What is read of an export of Ultralytics whose input has a shape."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor(shape, name="picture")]
    graph.outputs = [graph.tensor((1, 84, 21), name="boxes")]
    graph.op("RESHAPE", [0, graph.constant([1, 84, 21])], [1])
    file = io.BytesIO(write(graph))
    file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file, "a") as archive:
        fields = {"stride": 32, "task": "detect", "names": {0: "cat", 1: "dog"}, **more}
        archive.writestr("metadata.json", json.dumps(fields))
    return declared(file.getvalue())


def test_an_export_of_ultralytics_has_labels_a_task_and_fractions() -> None:
    for shape in ((1, 21, 28, 3), (1, 3, 21, 28)):
        found = exported(shape)
        assert (found.labels, found.exported.task, found.normalised) == (("cat", "dog"), "detect", True)
        assert "2 labels and boxes as fractions" in (describe(found) or "")


def test_boxes_that_a_model_has_chosen_are_pixels_in_some_exports() -> None:
    assert exported((1, 21, 28, 3), end2end=True).normalised is True
    assert exported((1, 3, 21, 28), end2end=True).normalised is None


def test_numbers_of_classes_have_labels_of_values() -> None:
    found = declared(detector(names := ["???", "cat", "dog"]))
    assert found.labels == tuple(names)
    assert found.normalised is None


def test_real_numbers_that_were_integers_have_their_step() -> None:
    graph = FileSubgraph()
    x = graph.tensor((1, 4), "int8", name="x", scales=[0.5], zeros=[-3])
    real, shaped, doubled = (
        graph.tensor((1, 4)),
        graph.tensor((2, 2), name="y"),
        graph.tensor((2, 2), name="z"),
    )
    graph.op("DEQUANTIZE", [x], [real])
    graph.op("RESHAPE", [real, graph.constant(np.array([2, 2], np.int32))], [shaped], "ReshapeOptions")
    graph.op("ADD", [shaped, shaped], [doubled], "AddOptions")
    graph.inputs, graph.outputs = [x], [shaped, doubled]
    assert steps_of(read(write(graph), "m.tflite")) == {"y": 0.5}
