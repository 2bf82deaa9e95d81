"""Real detectors in int8: they find what their float form finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from PIL import Image

from agent.bundle.processing import Preprocess
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor
from builder import load, quantize
from builder.compiling import declarations
from builder.importer import ImportedModel
from builder.quantising.calibration import open_calibration
from builder.quantising.session import Session

pytestmark = [pytest.mark.slow, pytest.mark.models]

Boxes = NDArray[np.float32]


def crops(pictures: list[Path], folder: Path, count: int, seed: int) -> Path:
    """Parts of photographs, as a camera nearer to its subject would take them."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    for i in range(count):
        with Image.open(pictures[i % len(pictures)]) as image:
            share = rng.uniform(0.6, 1)
            width, height = int(image.width * share), int(image.height * share)
            left, top = (
                int(rng.integers(image.width - width + 1)),
                int(rng.integers(image.height - height + 1)),
            )
            image.crop((left, top, left + width, top + height)).save(folder / f"{i:03}.png")
    return folder


def faces(model: ImportedModel, graph: onnx.ModelProto, declared: Preprocess, folder: Path) -> list[Boxes]:
    finish = Postprocessor(declarations.postprocess("faces", model.outputs), model.outputs)
    data, session = open_calibration(folder, model.inputs, declared), Session(graph)
    square = Placement(320, 240, 1.0, 1.0, 0.0, 0.0, 320, 240)
    found = []
    for index in range(len(data)):
        values = dict(zip(session.names, session.run(data.read(index)), strict=True))
        found.append(np.asarray(finish(values, square)["boxes"], np.float32))
    return found


def overlap(a: Boxes, b: Boxes) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    inside = float(np.prod(np.maximum(high - low, 0)))
    return inside / float(np.prod(a[2:] - a[:2]) + np.prod(b[2:] - b[:2]) - inside)


@pytest.mark.parametrize("name", ["RFB-320", "slim-320"])
def test_face_detector_in_int8_finds_the_same_faces(name: str, models: Path, tmp_path: Path) -> None:
    photographs = [models / "faces-1.jpg", models / "faces-2.jpg"]
    model = load(models / f"{name}.onnx")
    declared = declarations.preprocess("ultraface", model.inputs)
    result = quantize(model, crops(photographs, tmp_path / "crops", 32, seed=0), preprocess="ultraface")
    assert result.report.int8_share == 100
    assert result.report.bytes < 0.4 * result.report.float_bytes
    unseen = crops(photographs, tmp_path / "unseen", 16, seed=1)
    expected, found = (faces(model, graph, declared, unseen) for graph in (model.onnx, result.onnx))
    assert sum(map(len, expected)) >= 16
    overlaps = [
        max((overlap(box, other) for other in ours), default=0.0)
        for ours, theirs in zip(found, expected, strict=True)
        for box in theirs
    ]
    assert min(overlaps) >= 0.95, sorted(overlaps)
    assert sum(map(len, found)) == sum(map(len, expected))
