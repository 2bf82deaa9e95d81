"""The committed example model is as accurate as its README says, on the same path as on a device."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image

from agent.runtime.postprocess import Postprocessor
from agent.runtime.preprocess import Preprocessor
from builder.bundles.package import Package
from builder.running.in_memory import executor
from tests.patience import PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"
sys.path.insert(0, str(DIGITS))
import pictures  # noqa: E402

Classify = Callable[[bytes], str]


@pytest.fixture(scope="module")
def package(digits_bundle: Path) -> Package:
    return Package.load(digits_bundle)


@pytest.fixture(scope="module")
def classify(package: Package) -> Classify:
    """Return a function that maps a PNG file's bytes to the first label, using only the bundle."""
    manifest = package.manifest
    assert manifest.preprocess is not None
    assert manifest.postprocess is not None
    before = Preprocessor(manifest.preprocess, manifest.inputs[0])
    after = Postprocessor(manifest.postprocess, manifest.outputs, package.members["labels.txt"].splitlines())
    module = executor(package.members["mod.so"], package.members["mod.json"], package.members["mod.params"])

    def run(png: bytes) -> str:
        value = np.empty((1, 1, 8, 8), np.float32)
        before(before.decode(png, "image/png"), value)
        module.run(image=value)
        return after({"logits": module.get_output(0)})["labels"][0].decode()

    return run


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_model_is_small_and_has_a_widely_supported_opset() -> None:
    model = onnx.load(DIGITS / "digits.onnx")
    assert (DIGITS / "digits.onnx").stat().st_size < 500_000
    assert [(opset.domain, opset.version) for opset in model.opset_import] == [("", 17)]
    assert model.ir_version <= 8


@pytest.mark.slow
def test_held_out_png_files_are_recognised_with_98_per_cent_accuracy(classify: Classify) -> None:
    _, _, held_out, classes = pictures.load()
    assert len(held_out) == pictures.HELD_OUT
    labels = [classify(png(image)) for image in held_out]
    right = np.mean([label == pictures.NAMES[digit] for label, digit in zip(labels, classes, strict=True)])
    assert right >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize("digit", pictures.SAMPLES)
def test_each_committed_picture_is_recognised_as_its_name(classify: Classify, digit: int) -> None:
    path = DIGITS / f"{pictures.NAMES[digit]}.png"
    with Image.open(path) as image:
        assert (image.size, image.mode) == ((pictures.SIDE, pictures.SIDE), "L")
    assert classify(path.read_bytes()) == pictures.NAMES[digit]


def test_no_committed_picture_was_trained_on() -> None:
    trained = {image.tobytes() for image in pictures.load()[0]}
    for digit in pictures.SAMPLES:
        with Image.open(DIGITS / f"{pictures.NAMES[digit]}.png") as image:
            assert image.tobytes() not in trained


def test_declared_preprocessing_is_that_of_training(package: Package) -> None:
    declared = package.manifest.preprocess
    assert declared is not None
    image = pictures.load()[2][0]
    before = Preprocessor(declared, package.manifest.inputs[0])
    value = np.empty((1, 1, 8, 8), np.float32)
    before(before.decode(png(image), "image/png"), value)
    # Pillow rounds to a grey level after each direction: at most one level in total, in units of the input.
    expected = pictures.preprocess([image]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(value, expected, atol=1.01 / 255 / pictures.STD)


def test_labels_are_in_the_order_of_the_classes() -> None:
    assert tuple((DIGITS / "labels.txt").read_text().split()) == pictures.NAMES


@pytest.mark.slow
def test_training_exports_a_model_with_the_accuracy_that_it_prints(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(DIGITS / "train.py"), "--epochs", "3", "-o", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_PATIENCE_S,
        check=True,
    )
    printed = float(done.stdout.split("held-out ")[-1].partition("%")[0]) / 100
    assert printed > 0.9
    session = onnxruntime.InferenceSession(tmp_path / "digits.onnx")
    _, _, held_out, classes = pictures.load()
    values = pictures.preprocess(held_out).transpose(0, 3, 1, 2)
    answers = np.concatenate([session.run(None, {"image": value[None]})[0] for value in values])
    assert np.mean(answers.argmax(axis=1) == classes) == pytest.approx(printed, abs=0.005)
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(
        f"{pictures.NAMES[digit]}.png" for digit in pictures.SAMPLES
    )
