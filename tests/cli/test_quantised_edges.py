"""Models whose inputs and outputs are integers with a scale: compiled with a preset, and run on a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from builder.bundles.package import Package
from builder.running.local_run import run
from tests.cli.terminal import Edgebundle

COLOUR = (255, 51, 102)
KINDS = {"int8": TensorProto.INT8, "uint8": TensorProto.UINT8}


def means(path: Path, dtype: str, scale: float, zero: int, layout: str) -> Path:
    """Write a model whose output, in steps of 1/64 from 9, is the mean of each channel of the real input."""
    shape = [1, 3, 8, 8] if layout == "NCHW" else [1, 8, 8, 3]
    node = helper.make_node
    moved = [] if layout == "NCHW" else [node("Transpose", ["real"], ["moved"], perm=[0, 3, 1, 2])]
    nodes = [
        node("DequantizeLinear", ["picture", "s", "z"], ["real"]),
        *moved,
        node("GlobalAveragePool", ["moved" if moved else "real"], ["mean"]),
        node("Flatten", ["mean"], ["flat"]),
        node("QuantizeLinear", ["flat", "t", "nine"], ["y"]),
    ]
    given = {"s": np.float32(scale), "z": np.array(zero, dtype), "t": np.float32(1 / 64), "nine": np.uint8(9)}
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info("picture", KINDS[dtype], shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, [1, 3])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (20, 10), COLOUR).save(tmp_path / "red.png")
    return tmp_path / "red.png"


@pytest.mark.parametrize(
    ("dtype", "scale", "zero", "layout", "preset"),
    [
        ("int8", 1 / 255, -128, "NCHW", "unit"),
        ("uint8", 1 / 200, 7, "NHWC", "unit"),
        ("int8", 1 / 255, -128, "NHWC", "raw"),
        ("uint8", 0.0079, 128, "NCHW", "symmetric"),
    ],
)
def test_a_picture_and_a_score_have_the_scales_of_the_model(
    edgebundle: Edgebundle,
    tmp_path: Path,
    picture: Path,
    dtype: str,
    scale: float,
    zero: int,
    layout: str,
    preset: str,
) -> None:
    model, out = means(tmp_path / "means.onnx", dtype, scale, zero, layout), tmp_path / "out.bundle"
    result = edgebundle(
        "compile", str(model), "--preprocess", preset, "--postprocess", "top3", "-o", str(out)
    )
    assert result.returncode == 0, result
    shown = json.loads(edgebundle("run", str(out), "--inputs", str(picture), "--json").stdout)
    by_class = dict(zip(shown["answers"]["indices"], shown["answers"]["scores"], strict=True))
    unit = np.array(COLOUR) / 255
    expected = unit * 2 - 1 if preset == "symmetric" else unit
    found = np.array([by_class[place] for place in range(3)])
    np.testing.assert_allclose(found, expected.clip(-9 / 64), atol=1 / 64 + scale)
    lines = edgebundle("inspect", str(out)).stdout
    assert f"real numbers are (integer {-zero:+d}) *" in " ".join(lines.split())


def test_tensors_stay_raw_and_real_ones_are_taken(tmp_path: Path, edgebundle: Edgebundle) -> None:
    model, out = means(tmp_path / "means.onnx", "int8", 1 / 64, 5, "NCHW"), tmp_path / "out.bundle"
    assert edgebundle("compile", str(model), "-o", str(out)).returncode == 0
    package = Package.load(out)
    integers = np.full((1, 3, 8, 8), 21, np.int8)
    for given in (integers, np.full((1, 3, 8, 8), 0.25, np.float32)):
        found = run(package, {"picture": given})
        assert found.answers is None
        np.testing.assert_array_equal(found.outputs["output_0"], np.full((1, 3), 25, np.uint8))


def test_rows_are_real_on_both_sides(tmp_path: Path, edgebundle: Edgebundle) -> None:
    node = helper.make_node
    nodes = [node("DequantizeLinear", ["x", "s", "z"], ["f"]), node("ReduceSum", ["f"], ["g"]),
             node("QuantizeLinear", ["g", "t", "u"], ["y"])]  # fmt: skip
    given = {"s": np.float32(0.5), "z": np.int8(-3), "t": np.float32(2), "u": np.int8(10)}
    graph = helper.make_graph(
        nodes,
        "sum",
        [helper.make_tensor_value_info("x", TensorProto.INT8, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.INT8, [1, 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()],
    )
    model, out = tmp_path / "sum.onnx", tmp_path / "out.bundle"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model)
    assert edgebundle("compile", str(model), "--columns", "a,b", "-o", str(out)).returncode == 0
    (tmp_path / "rows.csv").write_text("a,b\n10.5,21.6\n")
    answers = tmp_path / "answers.csv"
    result = edgebundle("run", str(out), "--inputs", str(tmp_path / "rows.csv"), "-o", str(answers))
    assert result.returncode == 0, result
    assert answers.read_text().splitlines()[-1].endswith("32.0")
