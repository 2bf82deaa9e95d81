"""`edgebundle compile` with dimensions that have bounds: mistakes are told before the compiler is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from builder import run
from builder.bundles.package import Package
from tests import changing_models, streaming_models
from tests.builder.importer.frameworks.archive import write_pt2
from tests.builder.importer.frameworks.stand_in import stand_in
from tests.cli.terminal import Edgebundle


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "rows.onnx"
    onnx.save(changing_models.rows(), str(path))
    return path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-shapes", "x:[4..1,3]"], "sizes in increasing order in the shape of input 'x', got '4..1'"),
        (["--input-shapes", "x:[1..4,3]", "--buckets", "0"], "expected sizes of buckets, got '0'"),
        (["--input-shapes", "x:[1..4,3]", "--pad", "x"], "--pad: expected NAME=NUMBER or NAME=edge, got 'x'"),
        (["--input-shapes", "x:[0..4,3]"], "input 'x': expected bounds from 1, got 0..4"),
        (["--input-shapes", "x:[0..4,3]", "--state", "x:y", "--pad", "x=1"], "--pad: expected no state"),
        (
            ["--input-shapes", "x:[1..4,3]", "--precision", "int8", "--calibration", "."],
            "--precision int8: expected fixed shapes, got bounds",
        ),
        (
            ["--input-shapes", "x:[1..4,3]", "--precision", "fp16", "--target", "rpi5"],
            "--precision fp16: expected fixed shapes, got bounds",
        ),
        (["--buckets", "1,2"], "--buckets: expected bounds in --input-shapes, got none"),
        (["--pad", "x=1", "--input-shapes", "x:[4,3]"], "--pad: expected bounds in --input-shapes, got none"),
    ],
)
def test_mistakes(edgebundle: Edgebundle, model: Path, flags: list[str], words: str) -> None:
    result = edgebundle("compile", str(model), *flags)
    assert result.returncode == 4
    assert words in result.stderr, result
    assert not list(model.parent.glob("*.bundle"))


@pytest.mark.slow
def test_a_decoder_with_caches_that_grow(edgebundle: Edgebundle, tmp_path: Path) -> None:
    path = tmp_path / "writer.onnx"
    onnx.save(streaming_models.decoder(), str(path))
    flags = ["--state", "past.*:present.*", "-o", str(tmp_path / "writer.bundle")]
    bounds = ["--input-shapes", "past.key:[1,0..6,8]"]
    refused = edgebundle("compile", str(path), *flags, *bounds)
    assert refused.returncode == 4
    assert "hint: for an attention mask, --input-values mask=1" in refused.stderr
    result = edgebundle("compile", str(path), *flags, *bounds, "--input-values", "mask=1")
    assert result.returncode == 0, result
    shown = json.loads(edgebundle("inspect", str(tmp_path / "writer.bundle"), "--json").stdout)
    states = shown["manifest"]["states"]
    assert [(state["input"], state.get("most")) for state in states] == [
        ("past.key", None),
        ("past.value", None),
        ("edgebundle/cache/6", 6),
    ]
    assert edgebundle("run", str(tmp_path / "writer.bundle")).returncode == 0


@pytest.mark.slow
def test_summary_and_inspect_say_the_bounds(edgebundle: Edgebundle, model: Path) -> None:
    out = model.with_suffix(".bundle")
    command = ["compile", str(model), "--input-shapes", "x:[1..4,3]", "-o", str(out)]
    result = edgebundle(*command, "--buckets", "2", "--pad", "x=0.5")
    assert result.returncode == 0, result
    assert "batch=1..4: compiled for 2, 4 (padded: x with 0.5)" in result.stdout
    shown = edgebundle("inspect", str(out)).stdout
    assert "x FP32 [batch=1..4,3]" in shown
    assert "y FP32 [batch=1..4,2]" in shown
    found = json.loads(edgebundle("inspect", str(out), "--json").stdout)
    assert found["manifest"]["buckets"]["batch"] == "batch"
    assert edgebundle("run", str(out), "--input-shapes", "x:[3,3]").returncode == 0
    refused = edgebundle("run", str(out), "--input-shapes", "x:[5,3]")
    assert refused.returncode == 4
    assert "batch must be from 1 to 4" in refused.stderr


@pytest.mark.slow
def test_check_looks_at_the_largest_size_and_other_verbs_take_one(
    edgebundle: Edgebundle, model: Path
) -> None:
    shown = edgebundle("check", str(model), "--input-shapes", "x:[1..4,3]")
    assert "input x: FP32 [4,3]" in shown.stdout
    refused = edgebundle(
        "tune", str(model), "--input-shapes", "x:[1..4,3]", "-o", str(model.parent / "records")
    )
    assert refused.returncode == 4
    assert "only `edgebundle compile` and `check` take bounds" in refused.stderr


def quantised_rows() -> onnx.ModelProto:
    """A layer on each row of a batch as a quantiser writes it: `x` [batch, 16] to `y` [batch, 4]."""
    draw = np.random.default_rng(0)
    weights = {
        "w": draw.integers(-127, 128, (16, 4)).astype(np.int8), "ws": np.float32(0.01), "wz": np.int8(0),
        "xs": np.float32(0.02), "xz": np.uint8(120), "ys": np.float32(0.05), "yz": np.uint8(128),
    }  # fmt: skip
    names = {"x": ("x", "xs", "xz"), "h": ("h", "ys", "yz")}
    nodes = [helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"])]
    for value, (name, scale, zero) in names.items():
        if value == "h":
            nodes.append(helper.make_node("MatMul", ["x/f", "wf"], ["h"]))
        nodes.append(helper.make_node("QuantizeLinear", [name, scale, zero], [f"{value}/q"]))
        made = "y" if value == "h" else "x/f"
        nodes.append(helper.make_node("DequantizeLinear", [f"{value}/q", scale, zero], [made]))
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info("x", 1, ["batch", 16])],
        [helper.make_tensor_value_info("y", 1, ["batch", 4])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_a_model_that_is_quantised_already(edgebundle: Edgebundle, tmp_path: Path) -> None:
    path, out = tmp_path / "rows.onnx", tmp_path / "rows.bundle"
    onnx.save(quantised_rows(), str(path))
    result = edgebundle("compile", str(path), "--input-shapes", "x:[1..8,16]", "-o", str(out), "--json")
    assert result.returncode == 0, result
    package = Package.load(out)
    assert package.manifest.buckets is not None and len(package.manifest.buckets.dimensions[0].sizes) > 1
    assert b"integer_matmul" in package.members["mod.json"]
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path.read_bytes(), options)
    for batch in range(1, 9):
        x = np.random.default_rng(batch).standard_normal((batch, 16)).astype(np.float32)
        [wanted] = session.run(None, {"x": x})
        found = run(package, {"x": x}).get_output("output_0")
        assert found.shape == wanted.shape
        steps = np.abs(found - wanted) / 0.05
        assert steps.max() < 1.01 and steps.mean() < 0.05, batch


# What PyTorch would answer about `changing_models.rows`, for any batch.
_ROWS_IN_PYTORCH = """
if request['command'] == 'run':
    import numpy
    given = numpy.load('inputs.npz')['x']
    weight = numpy.load(os.path.join(vectors, 'weight.npy'))
    numpy.savez('outputs.npz', output_0=FACTOR * numpy.maximum(given @ weight, 0))
"""


def rows_of_pytorch(folder: Path, factor: str) -> tuple[list[str], np.ndarray]:
    """Return how to compile rows whose framework says `factor` times the right answer, and their weight."""
    vectors = folder / "vectors"
    vectors.mkdir()
    model = changing_models.rows()
    onnx.save(model, str(vectors / "model.onnx"))
    weight = numpy_helper.to_array(model.graph.initializer[0])
    np.save(vectors / "weight.npy", weight)
    example = np.ones((2, 3), np.float32)
    np.savez(vectors / "examples.npz", x=example)
    np.savez(vectors / "outputs.npz", output_0=np.zeros((2, 2), np.float32))
    reply = {"framework": "PyTorch 2.14.1", "inputs": ["x"], "outputs": ["y"]}
    (vectors / "reply.json").write_text(json.dumps(reply))
    answers = _ROWS_IN_PYTORCH.replace("FACTOR", factor)
    python = stand_in(folder, vectors, after=f"exec({answers!r})")
    path = write_pt2(folder / "rows.pt2")
    return ["compile", str(path), "--input-shapes", "x:[n=1..8,3]", "--python", python], weight


@pytest.mark.slow
@pytest.mark.parametrize("factor", ["1.01", "(1.01 if len(given) == 5 else 1)"])
def test_a_framework_that_says_otherwise(edgebundle: Edgebundle, tmp_path: Path, factor: str) -> None:
    """At every size, or only at the smallest of one bucket, of which a part is padding."""
    arguments, _ = rows_of_pytorch(tmp_path, factor)
    result = edgebundle(*arguments, "--buckets", "4,8", "-o", str(tmp_path / "rows.bundle"))
    assert result.returncode == 4, result
    assert "against PyTorch 2.14.1" in result.stderr
    assert not (tmp_path / "rows.bundle").exists()


@pytest.mark.slow
def test_a_program_of_pytorch(edgebundle: Edgebundle, tmp_path: Path) -> None:
    out = tmp_path / "rows.bundle"
    arguments, weight = rows_of_pytorch(tmp_path, "1")
    result = edgebundle(*arguments, "-o", str(out))
    assert result.returncode == 0, result
    assert "n=1..8: compiled for" in result.stdout
    package = Package.load(out)
    for batch in (1, 3, 8):
        x = np.random.default_rng(batch).standard_normal((batch, 3)).astype(np.float32)
        np.testing.assert_allclose(
            run(package, {"x": x}).get_output("output_0"), np.maximum(x @ weight, 0), rtol=1e-5, atol=1e-5
        )
