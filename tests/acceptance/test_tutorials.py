"""The steps of the classic TVM tutorials, on the command line and in Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from PIL import Image

from benchmarks.architectures import generate
from builder import Package, run
from tests.acceptance.commands import edgebundle
from tests.acceptance.conftest import SIZE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JPEG as large as a photograph, with structure at every scale: enough for random weights."""
    rng = np.random.default_rng(7)
    pixels = sum(
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (n, n, 3), "uint8")).resize(
                (640, 480), Image.Resampling.BICUBIC
            ),
            "float32",
        )
        for n in (3, 9, 30)
    )
    path = tmp_path_factory.mktemp("photo") / "cat.jpg"
    Image.fromarray(np.asarray(pixels / 3, np.uint8)).save(path, quality=95)
    return path


@pytest.fixture(scope="module")
def synset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("labels") / "synset.txt"
    path.write_text("".join(f"n{i:08d} class number {i}\n" for i in range(1000)))
    return path


def prepared(cat: Path) -> np.ndarray:
    """Preprocess the picture with the tutorial's own code."""
    image = np.asarray(Image.open(cat).resize((SIZE, SIZE), Image.Resampling.BILINEAR)).astype("float32")
    chw = np.transpose(image, (2, 0, 1)) / 255
    mean = np.array([0.485, 0.456, 0.406], "float32").reshape(3, 1, 1)
    std = np.array([0.229, 0.224, 0.225], "float32").reshape(3, 1, 1)
    return np.expand_dims((chw - mean) / std, 0).astype("float32")


def test_resnet50_v2_on_the_command_line(resnet50_v2: Path, cat: Path, synset: Path, tmp_path: Path) -> None:
    edgebundle(
        "compile", "--target", "llvm", "--preprocess", "imagenet", "--postprocess", "softmax,top5",
        "--labels", synset, "--output", "resnet50-v2-7-tvm.bundle", resnet50_v2, cwd=tmp_path,
    )  # fmt: skip
    data = prepared(cat)
    np.savez(tmp_path / "imagenet_cat.npz", data=data)
    printed = edgebundle(
        "run", "--device", "cpu", "--inputs", "imagenet_cat.npz", "--outputs", "predictions.npz",
        "--print-time", "--repeat", "10", "resnet50-v2-7-tvm.bundle", cwd=tmp_path,
    )  # fmt: skip
    assert "Execution time summary:" in printed
    assert re.search(r"mean \(ms\)\s+median \(ms\)\s+max \(ms\)\s+min \(ms\)\s+std \(ms\)", printed)

    weights = sum(onnx.numpy_helper.to_array(t).nbytes for t in onnx.load(resnet50_v2).graph.initializer)
    assert (tmp_path / "resnet50-v2-7-tvm.bundle").stat().st_size <= 1.1 * weights

    session = ort.InferenceSession(str(resnet50_v2), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, {"data": data})
    with np.load(tmp_path / "predictions.npz") as file:
        output = file["output_0"]
    assert np.abs(output - reference).max() <= 1e-4 * np.abs(reference).max()

    # The bundle declares the postprocessing that the tutorial does by hand.
    scores = np.exp(reference - reference.max())[0] / np.exp(reference - reference.max()).sum()
    best = np.argsort(scores)[::-1][:5]
    from_picture = edgebundle("run", "--inputs", cat, "resnet50-v2-7-tvm.bundle", cwd=tmp_path)
    lines = [line.split(maxsplit=2) for line in from_picture.splitlines()]
    assert [line[1] for line in lines] == [f"n{i:08d}" for i in best]
    assert [float(line[0]) for line in lines] == pytest.approx(scores[best], abs=2e-3)


def test_resnet18_from_python(resnet18: Path, resnet18_package: Package, cat: Path) -> None:
    """The package was imported, compiled, saved and loaded again as the tutorial does it in Python."""
    [spec] = resnet18_package.manifest.inputs
    data = prepared(cat)
    result = run(resnet18_package, {spec.name: data}, device="cpu", benchmark=True, repeat=3)
    session = ort.InferenceSession(str(resnet18), providers=["CPUExecutionProvider"])
    (reference,) = session.run(None, {spec.name: data})
    assert np.abs(result.get_output("output_0") - reference).max() <= 1e-4 * np.abs(reference).max()
    assert result.times is not None
    assert len(result.times.results) == 3


def test_bert_with_three_input_shapes(tmp_path: Path) -> None:
    onnx.save(generate("bert", layers=2, hidden=128, heads=2, vocabulary=1000), tmp_path / "bert.onnx")
    shapes = "input_ids:[1,16] attention_mask:[1,16] token_type_ids:[1,16]"
    edgebundle("compile", "bert.onnx", "--input-shapes", shapes, "-o", "bert.bundle", cwd=tmp_path)
    rng = np.random.default_rng(1)
    inputs: dict[str, Any] = {
        "input_ids": rng.integers(0, 1000, (1, 16)),
        "attention_mask": np.array([[1] * 12 + [0] * 4]),
        "token_type_ids": np.array([[0] * 8 + [1] * 8]),
    }
    np.savez(tmp_path / "inputs.npz", **inputs)
    edgebundle("run", "bert.bundle", "-i", "inputs.npz", "-o", "out.npz", cwd=tmp_path)
    session = ort.InferenceSession(str(tmp_path / "bert.onnx"), providers=["CPUExecutionProvider"])
    references = session.run(None, inputs)
    with np.load(tmp_path / "out.npz") as file:
        outputs = [file[f"output_{i}"] for i in range(len(references))]
    for ours, theirs in zip(outputs, references, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
