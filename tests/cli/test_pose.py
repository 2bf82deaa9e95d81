"""A model that finds one person's key points in a picture of bytes, as MoveNet does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tests.cli.terminal import Edgebundle

SIDE = 32
KINDS = {"uint8": TensorProto.UINT8, "int32": TensorProto.INT32, "float32": TensorProto.FLOAT}
WHITE = 0.8


def pose(path: Path, dtype: str) -> Path:
    """Write a model whose points lie on the picture's diagonal, as sure as the picture is bright."""
    points = np.zeros((1, 1, 17, 3), np.float32)
    points[0, 0, :, 0] = np.linspace(0.3, 0.6, 17)  # y
    points[0, 0, :, 1] = np.linspace(0.1, 0.9, 17)  # x
    sure = np.zeros((1, 1, 17, 3), np.float32)
    sure[..., 2] = WHITE / 255
    nodes = [
        helper.make_node("Cast", ["picture"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMax", ["real"], ["brightest"], keepdims=1),
        helper.make_node("Mul", ["brightest", "sure"], ["scaled"]),
        helper.make_node("Add", ["scaled", "points"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pose",
        [helper.make_tensor_value_info("picture", KINDS[dtype], [1, SIDE, SIDE, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 17, 3])],
        [numpy_helper.from_array(array, name) for name, array in (("points", points), ("sure", sure))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("dtype", KINDS)
def test_a_person_is_proposed_and_drawn(edgebundle: Edgebundle, tmp_path: Path, dtype: str) -> None:
    pose(tmp_path / "pose.onnx", dtype)
    Image.new("RGB", (128, 64), "white").save(tmp_path / "white.png")
    Image.new("RGB", (128, 64), (60, 60, 60)).save(tmp_path / "dark.png")
    compiled = edgebundle("compile", "pose.onnx", "-o", "plain.bundle", cwd=tmp_path)
    assert "look like MoveNet (17 key points of one person): --postprocess movenet" in compiled.stdout
    presets = ("--preprocess", "movenet", "--postprocess", "movenet")
    packed = edgebundle("repack", "plain.bundle", *presets, "-o", "pose.bundle", cwd=tmp_path)
    assert packed.returncode == 0, packed
    ran = edgebundle(
        "run", "pose.bundle", "--inputs", "white.png", "--json", "--draw", "drawn.png", cwd=tmp_path
    )
    answers = json.loads(ran.stdout)["answers"]
    # The picture is twice as wide as high: in the input, it fills the rows from 8 to 24.
    x, y = np.linspace(0.1, 0.9, 17) * 128, np.linspace(0.3, 0.6, 17) * 128 - 32
    np.testing.assert_allclose(answers["keypoints"][0], np.stack([x, y, np.full(17, WHITE)], 1), atol=1e-3)
    np.testing.assert_allclose(answers["boxes"], [[x[0], y[0], x[-1], y[-1]]], atol=1e-3)
    np.testing.assert_allclose(answers["scores"], [WHITE], atol=1e-6)
    with Image.open(tmp_path / "drawn.png") as drawn:
        assert drawn.getpixel((round(x[8]), round(y[8]))) != (255, 255, 255)
    nothing = edgebundle("run", "pose.bundle", "--inputs", "dark.png", cwd=tmp_path)
    assert "nothing above 0.25; the best was 0.1882 (class 0)" in nothing.stdout + nothing.stderr
    shown = edgebundle("inspect", "pose.bundle", cwd=tmp_path)
    assert "persons with key points from y, score over 0.25" in " ".join(shown.stdout.split())
