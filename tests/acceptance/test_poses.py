"""MoveNet as it is published: the pose of a bundle is that of LiteRT's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from builder import Package, run
from builder.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.models]

SIDE = 192
MODEL = "movenet_lightning_int8.tflite"
# LiteRT's kernels round differently, and this model amplifies it.
ROUNDING = 0.02


def poses(model: Path, picture: np.ndarray) -> np.ndarray:
    """The key points that each kind of LiteRT's kernels finds, shape (kinds, 17, 3)."""
    package = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    kinds = package.OpResolverType
    found = []
    for kind in (kinds.AUTO, kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES, kinds.BUILTIN_REF):
        interpreter = package.Interpreter(model_path=str(model), experimental_op_resolver_type=kind)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], picture[None])
        interpreter.invoke()
        found.append(interpreter.get_tensor(interpreter.get_output_details()[0]["index"])[0, 0])
    return np.stack(found)


@pytest.fixture(scope="module")
def bundle(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("movenet") / "movenet.bundle"
    presets = ["--preprocess", "movenet", "--postprocess", "movenet"]
    assert main(["compile", str(models / MODEL), *presets, "-o", str(path), "-q"]) == 0
    return path


@pytest.mark.parametrize("file", ["faces-1.jpg", "faces-2.jpg"])
def test_a_person_stands_where_litert_sees_it(
    bundle: Path, models: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # MoveNet's example: resized to fit, in the middle, on black.
    with Image.open(models / file) as given:
        size, factor = given.size, SIDE / max(given.size)
        new = [int(side * factor) for side in size]
        left, top = ((SIDE - side) // 2 for side in new)
        canvas = Image.new("RGB", (SIDE, SIDE))
        canvas.paste(given.convert("RGB").resize((new[0], new[1]), Image.Resampling.BILINEAR), (left, top))
    expected = poses(models / MODEL, np.asarray(canvas))
    answers: Any = run(Package.load(bundle), models / file).answers
    assert len(answers["scores"]) == 1
    sure = (expected[..., 2] > 0.35).all(axis=0)
    assert sure.sum() >= 3
    found = answers["keypoints"][0][sure]
    fractions = (found[:, 1::-1] * factor + [top, left]) / SIDE
    low, high = expected[:, sure, :2].min(axis=0), expected[:, sure, :2].max(axis=0)
    assert ((fractions >= low - ROUNDING) & (fractions <= high + ROUNDING)).all()
    drawn = tmp_path / "drawn.png"
    assert main(["run", str(bundle), "--inputs", str(models / file), "--draw", str(drawn)]) == 0
    with Image.open(drawn) as shown, Image.open(models / file) as given:
        changed = np.abs(np.asarray(shown, int) - np.asarray(given.convert("RGB"), int)).max(axis=2)
    for x, y, _ in found:
        assert changed[round(y) - 2 : round(y) + 3, round(x) - 2 : round(x) + 3].max() > 100


def test_a_bear_is_no_person(bundle: Path, models: Path) -> None:
    answers: Any = run(Package.load(bundle), models / "coco-285.jpg").answers
    assert answers["keypoints"].shape == (0, 17, 3)
