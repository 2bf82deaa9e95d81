"""Detectors of TensorFlow Lite that answer numbers of classes: names are at the right ones, or refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from flatbuffers import flexbuffers
from PIL import Image

from tests.builder.importer.tflite.tflite_file import FileSubgraph, write
from tests.cli.terminal import Edgebundle

# How many classes a model has -> COCO's number of a bear in it; 91 count the background.
BEARS = {80: 21, 90: 22, 91: 23}
NAMES = [f"TFLite_Detection_PostProcess{number}" for number in ("", ":1", ":2", ":3")]
BOX = (0.25, 0.5, 0.5, 0.75)  # y0, x0, y1, x1


def detector(classes: int, names: Sequence[str] = NAMES, scales: Sequence[float] = ()) -> bytes:
    """Return a file that finds one bear in every picture; with scales, its outputs are integers."""
    options = {
        "max_detections": 5, "max_classes_per_detection": 1, "num_classes": classes,
        "nms_score_threshold": 0.3, "nms_iou_threshold": 0.6,
        "y_scale": 10.0, "x_scale": 10.0, "h_scale": 5.0, "w_scale": 5.0,
    }  # fmt: skip
    has_background = classes != 91
    scores = np.full((1, 2, classes + has_background), 0.01, np.float32)
    scores[0, 0, has_background + BEARS[classes]] = 0.9
    y0, x0, y1, x1 = BOX
    anchors = np.array([[(y0 + y1) / 2, (x0 + x1) / 2, y1 - y0, x1 - x0], [0.8, 0.2, 0.1, 0.1]], np.float32)
    graph = FileSubgraph()
    picture = graph.tensor((1, 8, 8, 3), "uint8", name="picture", scales=[1 / 128], zeros=[128])
    real, mean, none = (graph.tensor(shape) for shape in ((1, 8, 8, 3), (1, 1, 1), (1, 1, 1)))
    boxes, found = graph.tensor((1, 2, 4)), graph.tensor(scores.shape)
    graph.op("DEQUANTIZE", [picture], [real])
    flat = graph.tensor((1, 1, 192))
    graph.op("RESHAPE", [real, graph.constant(np.array([1, 1, 192], np.int32))], [flat], "ReshapeOptions")
    graph.op("MEAN", [flat, graph.constant(np.array([2], np.int32))], [mean], "ReducerOptions", KeepDims=True)
    graph.op("MUL", [mean, graph.constant(np.float32(0))], [none], "MulOptions")
    graph.op("ADD", [graph.constant(np.zeros((1, 2, 4), np.float32)), none], [boxes], "AddOptions")
    graph.op("ADD", [graph.constant(scores), none], [found], "AddOptions")
    shapes = [(1, 5, 4), (1, 5), (1, 5), (1,)]
    ends = [graph.tensor(shape, name=name) for shape, name in zip(shapes, names, strict=True)]
    custom = bytes(flexbuffers.Dumps(options))
    graph.op(NAMES[0], [boxes, found, graph.constant(anchors)], list(ends), custom=custom)
    for place, scale in enumerate(scales):
        written = graph.tensor(shapes[place], "uint8", name=f"{names[place]}_int8", scales=[scale], zeros=[3])
        graph.op("QUANTIZE", [ends[place]], [written])
        ends[place] = written
    # The converter orders outputs by their names.
    graph.inputs, graph.outputs = [picture], sorted(ends, key=lambda end: str(graph.tensors[end].name))
    return write(graph)


@pytest.mark.slow
@pytest.mark.parametrize("classes", BEARS)
def test_a_bear_is_a_bear_with_cocos_names(edgebundle: Edgebundle, tmp_path: Path, classes: int) -> None:
    (tmp_path / "ssd.tflite").write_bytes(detector(classes))
    Image.new("RGB", (80, 40), "grey").save(tmp_path / "grey.png")
    flags = ("--preprocess", "raw", "--postprocess", "tf-detections")
    given = edgebundle(
        "compile", "ssd.tflite", *flags, "--labels", "coco", "-o", "given.bundle", cwd=tmp_path
    )
    assert given.returncode == 0, given
    none = ("--postprocess", "none", "--labels", "none", "-o", "plain.bundle")
    plain = edgebundle("repack", "given.bundle", *none, cwd=tmp_path)
    assert plain.returncode == 0, plain
    added = edgebundle(
        "repack", "plain.bundle", *flags, "--labels", "coco", "-o", "added.bundle", cwd=tmp_path
    )
    assert added.returncode == 0, added
    for bundle in ("given.bundle", "added.bundle"):
        ran = edgebundle("run", bundle, "--inputs", "grey.png", "--json", cwd=tmp_path)
        answers = json.loads(ran.stdout)["answers"]
        assert (answers["labels"], answers["classes"]) == (["bear"], [BEARS[classes]])
        np.testing.assert_allclose(answers["boxes"], [[40, 10, 60, 20]], atol=0.01)
    (tmp_path / "few.txt").write_text("cat\ndog\n")
    refused = edgebundle("repack", "given.bundle", "--labels", "few.txt", "-o", "few.bundle", cwd=tmp_path)
    assert refused.returncode != 0
    assert f"few.txt: expected {classes} labels for {NAMES[1]}, got 2" in refused.stderr


@pytest.mark.slow
def test_names_that_say_nothing_and_integers_are_told_by_the_operator(
    edgebundle: Edgebundle, tmp_path: Path
) -> None:
    names = [f"StatefulPartitionedCall:{number}" for number in (3, 1, 0, 2)]
    (tmp_path / "ssd.tflite").write_bytes(detector(90, names, (1 / 250, 90 / 240, 1 / 200, 0.1)))
    plain = edgebundle("compile", "ssd.tflite", "-o", "plain.bundle", cwd=tmp_path)
    assert "look like a detector of TensorFlow" in plain.stdout
    assert "--postprocess tf-detections --preprocess raw" in plain.stdout
    added = edgebundle(
        *(
            "repack",
            "plain.bundle",
            "--postprocess",
            "tf-detections",
            "--preprocess",
            "raw",
            "--labels",
            "coco",
        ),
        *("-o", "added.bundle"),
        cwd=tmp_path,
    )
    assert added.returncode == 0, added
    Image.new("RGB", (80, 40), "grey").save(tmp_path / "grey.png")
    ran = edgebundle("run", "added.bundle", "--inputs", "grey.png", "--json", cwd=tmp_path)
    answers = json.loads(ran.stdout)["answers"]
    assert (answers["labels"], answers["classes"]) == (["bear"], [22])
    np.testing.assert_allclose(answers["boxes"], [[40, 10, 60, 20]], atol=0.4)
