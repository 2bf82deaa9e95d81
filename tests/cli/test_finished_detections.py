"""Detectors that end in a suppression of their own, whose number of objects is only known at run time."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tests.cli.terminal import Edgebundle

SIDE, ROWS = 32, 12


def detector() -> onnx.ModelProto:
    """torchvision's form: boxes [n, 4], labels [n] and scores [n]; two of three objects remain."""
    boxes = np.zeros((1, ROWS, 4), np.float32)
    boxes[0, :3] = np.array([[4, 6, 20, 30], [1, 1, 9, 9], [4.2, 6, 20, 30]])
    scores = np.zeros((1, 2, ROWS), np.float32)
    scores[0, 1, 0], scores[0, 0, 1], scores[0, 1, 2] = 0.9, 0.6, 0.8
    constants = {
        "nothing": np.array(0, np.float32), "boxes_": boxes, "scores_": scores,
        "first": np.array([0], np.int64), "most": np.array([10], np.int64),
        "iou": np.array([0.5], np.float32), "least": np.array([0.3], np.float32),
        "one": np.array(1, np.int64), "two": np.array(2, np.int64),
    }  # fmt: skip
    make = helper.make_node
    nodes = [
        make("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=0),
        make("Mul", ["mean", "nothing"], ["zero"]),
        make("Add", ["boxes_", "zero"], ["all"]),
        make("Add", ["scores_", "zero"], ["each"]),
        make("NonMaxSuppression", ["all", "each", "most", "iou", "least"], ["kept"]),
        make("Gather", ["kept", "two"], ["rows"], axis=1),
        make("Gather", ["kept", "one"], ["labels"], axis=1),
        make("Squeeze", ["all", "first"], ["plain"]),
        make("Gather", ["plain", "rows"], ["boxes"], axis=0),
        make("GatherND", ["each", "kept"], ["scores"]),
    ]
    value = helper.make_tensor_value_info
    outputs = [
        value("boxes", TensorProto.FLOAT, ["n", 4]),
        value("labels", TensorProto.INT64, ["n"]),
        value("scores", TensorProto.FLOAT, ["n"]),
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    image = value("x", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
    graph = helper.make_graph(nodes, "detector", [image], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])


@pytest.mark.slow
def test_objects_of_a_computed_number_are_answered_and_no_padding(
    edgebundle: Edgebundle, tmp_path: Path
) -> None:
    onnx.save(detector(), tmp_path / "m.onnx")
    Image.new("RGB", (2 * SIDE, 2 * SIDE)).save(tmp_path / "p.png")
    compiled = edgebundle("compile", "m.onnx", "-o", "plain.bundle", cwd=tmp_path)
    assert "--postprocess detections" in compiled.stdout
    presets = ("--preprocess", "unit", "--postprocess", "detections,score_threshold=0.0")
    repacked = edgebundle("repack", "plain.bundle", *presets, "-o", "m.bundle", cwd=tmp_path)
    assert repacked.returncode == 0, repacked.stderr
    ran = edgebundle("run", "m.bundle", "--inputs", "p.png", "--json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    answer = json.loads(ran.stdout)["answers"]
    np.testing.assert_allclose(answer["boxes"], [[8, 12, 40, 60], [2, 2, 18, 18]], atol=1e-3)
    assert answer["classes"] == [1, 0]
