"""A reader of text lines: short lines keep their proportions, so that their letters are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from tests.cli.terminal import Edgebundle

SIDE, STEPS = 8, 6
GLYPHS = np.random.default_rng(7).choice([-1.0, 1.0], (2, SIDE, SIDE))  # "4" and "2"


def reader(path: Path, channels: int) -> Path:
    """Write a model that compares each square of a line with two glyphs; the blank is in between."""
    weights = np.zeros((3, channels, SIDE, SIDE), np.float32)
    weights[1:] = GLYPHS[:, None] / channels
    bias = np.array([SIDE * SIDE / 2, 0, 0], np.float32)
    nodes = [
        helper.make_node("Conv", ["line", "w", "b"], ["squares"], strides=[SIDE, SIDE]),
        helper.make_node("Squeeze", ["squares", "axis"], ["classes"]),
        helper.make_node("Transpose", ["classes"], ["steps"], perm=[0, 2, 1]),
        helper.make_node("Softmax", ["steps"], ["y"], axis=2),
    ]
    given = {"w": weights, "b": bias, "axis": np.array([2], np.int64)}
    graph = helper.make_graph(
        nodes,
        "reader",
        [helper.make_tensor_value_info("line", TensorProto.FLOAT, [1, channels, SIDE, SIDE * STEPS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, STEPS, 3])],
        [numpy_helper.from_array(array, name) for name, array in given.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize(("channels", "preset"), [(3, "paddleocr"), (1, "easyocr")])
def test_a_short_line_is_read(edgebundle: Edgebundle, tmp_path: Path, channels: int, preset: str) -> None:
    reader(tmp_path / "reader.onnx", channels)
    (tmp_path / "characters.txt").write_text("4\n2\n")
    pixels = np.concatenate(GLYPHS, axis=1) * 127.5 + 127.5
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "42.png")
    compiled = edgebundle("compile", "reader.onnx", "-o", "plain.bundle", cwd=tmp_path)
    assert f"--postprocess ctc --preprocess {preset}" in compiled.stdout
    read = {}
    for mode in (preset, "symmetric"):
        flags = ("--preprocess", mode, "--postprocess", "ctc", "--labels", "characters.txt")
        packed = edgebundle("repack", "plain.bundle", *flags, "-o", "reader.bundle", cwd=tmp_path)
        assert packed.returncode == 0, packed
        ran = edgebundle("run", "reader.bundle", "--inputs", "42.png", "--json", cwd=tmp_path)
        read[mode] = json.loads(ran.stdout)["answers"]["text"]
    assert read[preset] == ["42"]
    assert read["symmetric"] != ["42"]
