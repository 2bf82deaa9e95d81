"""The model's input as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.declarations import preprocess
from builder.errors import ModelError
from builder.running.shown_input import show_input


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((1, 3, 32, 48), "imagenet"),
        ((1, 3, 32, 48), "nanodet"),
        ((1, 32, 48, 3), "raw-bgr"),
        ((1, 3, 32, 48), "unit,invert=true"),
        ((1, 1, 32, 48), "symmetric"),
    ],
)
def test_colours_are_those_of_the_picture(tmp_path: Path, shape: tuple[int, ...], text: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 48, 3)).astype(np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "in.png")
    inputs = [TensorSpec("x", "FP32", shape)]
    show_input(preprocess(text, inputs), inputs, tmp_path / "in.png", tmp_path / "out.png")
    expected = picture.convert("L") if shape[1] == 1 else picture
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "out.png")), np.asarray(expected))


def test_a_letterbox_is_seen(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), (200, 10, 30)).save(tmp_path / "in.png")
    inputs = [TensorSpec("x", "FP32", (1, 3, 32, 32))]
    show_input(preprocess("yolox", inputs), inputs, tmp_path / "in.png", tmp_path / "out.png")
    shown = np.asarray(Image.open(tmp_path / "out.png"))
    assert (shown[:16] == [200, 10, 30]).all()
    assert (shown[16:] == 114).all()


def test_what_cannot_be_shown_gets_one_line(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10)).save(tmp_path / "in.png")
    inputs = [TensorSpec("x", "FP32", (1, 3, 32, 32))]
    declared = preprocess("unit", inputs)
    for picture, output, says in (
        ("absent.png", "out.png", "cannot be read"),
        ("in.png", "absent/out.png", "cannot be written"),
        ("in.png", "out.unknown", "cannot be written"),
    ):
        with pytest.raises(ModelError, match=says):
            show_input(declared, inputs, tmp_path / picture, tmp_path / output)
    with pytest.raises(ModelError, match="declares how a picture becomes its input"):
        show_input(None, inputs, tmp_path / "in.png", tmp_path / "out.png")
