from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agent.bundle.processing import Detect, Pose, Postprocess
from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from builder.running.nearest import nearest_of
from tests.bundles import make_manifest

STEP = Detect("boxes", "scores", 0.25, 0.5, 10, "corners", normalised=True)
BOXES = np.array([[[0, 0, 1, 1], [0, 0, 0.5, 0.5]]], np.float32)


def said(scores: np.ndarray[Any, Any], labels: tuple[bytes, ...] = (), **changes: Any) -> str:
    specs = (
        TensorSpec("boxes", "FP32", (1, 2, 4)),
        TensorSpec.from_dtype("scores", str(scores.dtype), (1, 2, 2)),
    )
    manifest = make_manifest(outputs=specs, postprocess=Postprocess((STEP,)), **changes)
    return str(nearest_of(manifest, labels, {"boxes": BOXES, "scores": scores}))


@pytest.mark.parametrize(
    ("best", "labels", "line"),
    [
        (0.2, (), "nothing above 0.25; the best was 0.2000 (class 1)"),
        (0.0002, (b"cat", b"person"), "nothing above 0.25; the best was 0.0002 (person)"),
        (3e-7, (), "nothing above 0.25; the best was 3.0e-07 (class 1)"),
        (0.0, (), "nothing above 0.25; no score is above 0"),
        (0.3, (), "None"),
    ],
)
def test_the_best_score_is_named(best: float, labels: tuple[bytes, ...], line: str) -> None:
    scores = np.zeros((1, 2, 2), np.float32)
    scores[0, 1, 1] = best
    assert said(scores, labels) == line


def test_a_quantised_score_is_real() -> None:
    scores = np.array([[[-128, -120], [-128, -128]]], np.int8)
    quantisation = Quantisation((), (Quantised("scores", 1 / 256, -128),))
    assert said(scores, quantisation=quantisation) == "nothing above 0.25; the best was 0.0312 (class 1)"


def test_a_person_that_is_hardly_seen_is_named() -> None:
    points = np.full((1, 1, 17, 3), 0.125, np.float32)
    manifest = make_manifest(
        outputs=(TensorSpec("y", "FP32", points.shape),), postprocess=Postprocess((Pose("y"),))
    )
    assert str(nearest_of(manifest, (), {"y": points})) == "nothing above 0.25; the best was 0.1250 (class 0)"
