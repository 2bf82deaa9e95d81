"""Files as Ultralytics exports them for TensorFlow Lite: fractions, names in an archive, integer edges."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.builder.importer.tflite.tflite_file import FileSubgraph, write
from tests.cli.terminal import Edgebundle

SIDE, CELLS = 32, 21  # 16 + 4 + 1
BOX = (0.5, 0.5, 0.5, 0.25)  # x, y, width, height
NAMES = {0: "cat", 1: "dog"}
# Datatype, layout, scale and zero point of the output, and the metadata's member.
FORMS = [
    ("float32", "NHWC", 0.0, 0, "metadata.json"),
    ("float32", "NCHW", 0.0, 0, "metadata.json"),
    ("int8", "NHWC", 1 / 254, -127, "temp_meta.txt"),
    ("uint8", "NHWC", 1 / 250, 3, "metadata.json"),
    ("int8", "NCHW", 1 / 127, -101, "metadata.json"),
]


def detector(dtype: str, layout: str, scale: float, zero: int, member: str) -> bytes:
    """Return a file that finds a dog whose score is the picture's red."""
    rows = np.zeros((1, 6, CELLS), np.float32)
    rows[0, :4, 3] = BOX
    red = np.zeros((1, 6, CELLS), np.float32)
    red[0, 5, 3] = 1.0
    shape = (1, SIDE, SIDE, 3) if layout == "NHWC" else (1, 3, SIDE, SIDE)
    graph = FileSubgraph()
    is_integer = dtype != "float32"
    first = {"int8": -128, "uint8": 0}.get(dtype, 0)
    picture = graph.tensor(
        shape, dtype, name="images", **({"scales": [1 / 255], "zeros": [first]} if is_integer else {})
    )
    real = picture
    if is_integer:
        real = graph.tensor(shape)
        graph.op("DEQUANTIZE", [picture], [real])
    channel, mean, whole = graph.tensor((1, 1)), graph.tensor((1, 1, 1)), graph.tensor((1, 6, CELLS))
    means, sliced = graph.tensor((1, 3)), graph.tensor((1, 6, CELLS))
    axes = [1, 2] if layout == "NHWC" else [2, 3]
    graph.op("MEAN", [real, graph.constant(np.array(axes, np.int32))], [means], "ReducerOptions")
    begin, size = (graph.constant(np.array(each, np.int32)) for each in ([0, 0], [1, 1]))
    graph.op("SLICE", [means, begin, size], [channel])
    graph.op("RESHAPE", [channel, graph.constant(np.array([1, 1, 1], np.int32))], [mean], "ReshapeOptions")
    graph.op("MUL", [mean, graph.constant(red)], [sliced], "MulOptions")
    graph.op("ADD", [sliced, graph.constant(rows)], [whole], "AddOptions")
    output = whole
    if is_integer:
        output = graph.tensor((1, 6, CELLS), dtype, name="Identity", scales=[scale], zeros=[zero])
        graph.op("QUANTIZE", [whole], [output])
    graph.inputs, graph.outputs = [picture], [output]
    file = io.BytesIO(write(graph))
    file.seek(0, io.SEEK_END)
    with zipfile.ZipFile(file, "a") as archive:
        fields = {"stride": 32, "task": "detect", "imgsz": [SIDE, SIDE], "names": NAMES}
        archive.writestr(member, json.dumps(fields) if member.endswith("json") else str(fields))
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "layout", "scale", "zero", "member"), FORMS)
def test_what_is_proposed_finds_the_dog(
    edgebundle: Edgebundle, tmp_path: Path, dtype: str, layout: str, scale: float, zero: int, member: str
) -> None:
    (tmp_path / "yolo.tflite").write_bytes(detector(dtype, layout, scale, zero, member))
    # Twice as wide as high, the rest is grey of 114: red is (204 + 114) / 2.
    Image.new("RGB", (128, 64), (204, 10, 10)).save(tmp_path / "red.png")
    compiled = edgebundle("compile", "yolo.tflite", "-o", "plain.bundle", cwd=tmp_path)
    assert "--postprocess yolov8,normalised=true --preprocess yolov8" in compiled.stdout, compiled
    presets = ("--preprocess", "yolov8", "--postprocess", "yolov8,normalised=true")
    packed = edgebundle("repack", "plain.bundle", *presets, "-o", "yolo.bundle", cwd=tmp_path)
    assert packed.returncode == 0, packed
    ran = edgebundle("run", "yolo.bundle", "--inputs", "red.png", "--json", cwd=tmp_path)
    answers = json.loads(ran.stdout)["answers"]
    assert answers["labels"] == ["dog"]
    np.testing.assert_allclose(answers["boxes"], [[32, 16, 96, 48]], atol=1.0)
    np.testing.assert_allclose(answers["scores"], [(204 + 114) / 2 / 255], atol=0.01)
    refused = edgebundle("compile", "yolo.tflite", "--postprocess", "yolov8", cwd=tmp_path)
    assert refused.returncode != 0 and "normalised=true" in refused.stderr
