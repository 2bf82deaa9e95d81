"""Detectors as their authors publish them: the objects of a bundle are those of the authors' post-processing.

The references are written from the authors' definitions, in pixels of the picture, and read what ONNX Runtime
computes from the same input. They share no code with what they check.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from PIL import Image

from agent.runtime.preprocess import Preprocessor
from builder import Package, run
from builder.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.models]

Objects = list[tuple[float, int, np.ndarray]]  # score, class, corners and points
Arrays = dict[str, np.ndarray]


def intersection_over_union(a: np.ndarray, b: np.ndarray) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0.0, width) * max(0.0, height)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


def suppressed(found: Objects, threshold: float) -> Objects:
    kept: Objects = []
    for each in sorted(found, key=lambda one: -one[0]):
        if all(
            each[1] != other[1] or intersection_over_union(each[2], other[2]) <= threshold for other in kept
        ):
            kept.append(each)
    return kept


def yolox(outputs: Arrays, ratio: tuple[float, float]) -> Objects:
    """YOLOX's `demo_postprocess` and `multiclass_nms`: offsets in cells, exponentials; 0.3 and 0.45."""
    (rows,) = outputs["output"].astype(np.float64)
    found: Objects = []
    index = 0
    for stride in (8, 16, 32):
        for y in range(416 // stride):
            for x in range(416 // stride):
                row = rows[index]
                index += 1
                kind = int(np.argmax(row[5:]))
                score = row[4] * row[5 + kind]
                if score > 0.3:
                    cx, cy = (row[0] + x) * stride, (row[1] + y) * stride
                    w, h = np.exp(row[2]) * stride, np.exp(row[3]) * stride
                    box = np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2])
                    found.append((score, kind, box / min(ratio)))
    return suppressed(found, 0.45)


def nanodet(outputs: Arrays, ratio: tuple[float, float]) -> Objects:
    """NanoDet's `get_bboxes`: expectation of each distance from the middle of a cell; 0.35 and 0.6."""
    found: Objects = []
    for stride in (8, 16, 32):
        scores = outputs[f"cls_pred_stride_{stride}"][0].astype(np.float64)
        sides = outputs[f"dis_pred_stride_{stride}"][0].astype(np.float64).reshape(-1, 4, 8)
        weights = np.exp(sides - sides.max(axis=2, keepdims=True))
        distances = (weights / weights.sum(axis=2, keepdims=True) * np.arange(8)).sum(axis=2) * stride
        for index, kind in zip(*np.nonzero(scores > 0.35), strict=True):
            x = (index % (416 // stride) + 0.5) * stride
            y = (index // (416 // stride) + 0.5) * stride
            left, top, right, bottom = distances[index]
            box = np.array([x - left, y - top, x + right, y + bottom])
            found.append((scores[index, kind], int(kind), box / [*ratio, *ratio]))
    return suppressed(found, 0.6)


def yunet(outputs: Arrays, ratio: tuple[float, float]) -> Objects:
    """YuNet's decoding, as in OpenCV's FaceDetectorYN: root of both scores, points in cells; 0.6 and 0.3."""
    found: Objects = []
    for stride in (8, 16, 32):
        cls, obj, bbox, kps = (
            outputs[f"{name}_{stride}"][0].astype(np.float64) for name in ("cls", "obj", "bbox", "kps")
        )
        for index in range(len(cls)):
            score = np.sqrt(np.clip(cls[index, 0], 0, 1) * np.clip(obj[index, 0], 0, 1))
            if score > 0.6:
                x, y = index % (320 // stride), index // (320 // stride)
                cx, cy = (x + bbox[index, 0]) * stride, (y + bbox[index, 1]) * stride
                w, h = np.exp(bbox[index, 2]) * stride, np.exp(bbox[index, 3]) * stride
                points = (kps[index].reshape(5, 2) + np.array([x, y])) * stride
                box = np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2, *points.reshape(-1)])
                found.append((score, 0, box / min(ratio)))
    return suppressed(found, 0.3)


CASES: dict[str, tuple[str, str, Callable[[Arrays, tuple[float, float]], Objects], tuple[str, ...], str]] = {
    "yolox_nano": ("yolox", "coco", yolox, ("coco-285.jpg", "faces-1.jpg"), "bear"),
    "nanodet_m_416": ("nanodet", "coco", nanodet, ("coco-285.jpg", "faces-1.jpg"), "bear"),
    "yunet_n_320": ("yunet", "", yunet, ("faces-1.jpg", "faces-2.jpg"), ""),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The first command of a user: the model's name, and its bundle."""
    preset, labels, *_ = CASES[request.param]
    bundle = tmp_path_factory.mktemp(request.param) / "a.bundle"
    declared = ["--preprocess", preset, "--postprocess", preset, *(["--labels", labels] if labels else [])]
    model = str(models / f"{request.param}.onnx")
    assert main(["compile", model, *declared, "-o", str(bundle), "-q"]) == 0
    return request.param, bundle


def test_the_second_command_draws_what_was_found(
    case: tuple[str, Path], models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, bundle = case
    *_, (file, _), label = CASES[name]
    drawn = tmp_path / "drawn.png"
    assert main(["run", str(bundle), "--inputs", str(models / file), "--draw", str(drawn)]) == 0
    (best, *_) = capsys.readouterr().out.splitlines()
    assert label in best
    with Image.open(models / file) as given, Image.open(drawn) as shown:
        assert shown.size == given.size
        changed = np.abs(np.asarray(shown.convert("RGB"), int) - np.asarray(given.convert("RGB"), int)).max(
            axis=2
        )
    x0, y0, x1, y1 = (int(edge) for edge in best[best.index("[") + 1 : best.index("]")].split(","))
    # Along the upper and the right edge of the best box.
    for place in (
        (slice(max(0, y0 - 1), y0 + 2), slice(x0, x1)),
        (slice(y0, y1), slice(max(0, x1 - 2), x1 + 2)),
    ):
        assert changed[place].max() > 100


def test_objects_are_those_of_the_authors_post_processing(case: tuple[str, Path], models: Path) -> None:
    name, bundle = case
    package = Package.load(bundle)
    _, _, reference, pictures, first = CASES[name]
    session = ort.InferenceSession(models / f"{name}.onnx")
    spec, declared = package.manifest.inputs[0], package.manifest.preprocess
    assert declared is not None
    preprocessor = Preprocessor(declared, spec)
    for file in pictures:
        value = np.empty(spec.shape, np.float32)
        picture = preprocessor.decode((models / file).read_bytes(), "image/jpeg")
        preprocessor(picture, value)
        ratio = (spec.shape[3] / picture.width, spec.shape[2] / picture.height)
        names = [output.name for output in session.get_outputs()]
        expected = reference(dict(zip(names, session.run(None, {spec.name: value}), strict=True)), ratio)
        answers: Any = run(package, models / file).answers
        assert len(expected) > 0
        boxes, kinds = np.asarray(answers["boxes"]), np.asarray(answers["classes"])
        assert kinds.tolist() == [kind for _, kind, _ in expected]
        limits = [picture.width, picture.height] * 2
        corners = np.array([box[:4] for *_, box in expected]).clip(0, limits)
        np.testing.assert_allclose(boxes, corners, atol=1)
        np.testing.assert_allclose(answers["scores"], np.array([score for score, *_ in expected]), atol=1e-3)
        if "keypoints" in answers:
            points = np.array([box[4:].reshape(5, 2) for *_, box in expected])
            np.testing.assert_allclose(answers["keypoints"], points, atol=1)
    if first:
        labels = (run(package, models / pictures[0]).answers or {})["labels"]
        assert bytes(labels[0]).decode() == first
