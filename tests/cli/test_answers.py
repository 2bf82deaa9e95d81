"""An answer as lines and as JSON: the same of this machine and of a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.cli.answers import Stretch, document, lines_of, output_of, stretches
from edgebundle.answer import Answer, Timing


def answer(**values: Any) -> Answer:
    outputs = (
        output_of(name, value if isinstance(value, tuple) else np.asarray(value))
        for name, value in values.items()
    )
    return Answer("kitchen", "model", "1", tuple(outputs), Timing(0.1))


BOXES = {
    "boxes": np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32),
    "scores": np.array([0.75, 0.5], np.float32),
    "classes": np.array([3, 4]),
}
KEYPOINTS = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
SEGMENTS = {"segments": np.array([[0.5, 1.25], [2, 61]]), "seconds": np.array([70.0])}


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"scores": [0.9, 0.1], "indices": [7, 2]}, ["  0.9000  class 7", "  0.1000  class 2"]),
        ({"scores": [0.9], "indices": [7], "labels": (b"seven",)}, ["  0.9000  seven"]),
        (
            BOXES | {"labels": (b"cat", b"zebra")},
            ["  0.7500  cat    [1, 2, 3, 4]", "  0.5000  zebra  [5, 6, 7, 8]"],
        ),
        (
            BOXES | {"keypoints": KEYPOINTS},
            [
                "  0.7500  class 3  [1, 2, 3, 4]  (0, 1) (3, 4)",
                "  0.5000  class 4  [5, 6, 7, 8]  (6, 7) (9, 10)",
            ],
        ),
        ({name: value[:0] for name, value in BOXES.items()}, ["nothing was found"]),
        ({"text": (b"42",), "scores": [0.5]}, ["  0.5000  42"]),
        (
            {"class_map": np.zeros((2, 2), np.uint8), "classes": [0, 5], "shares": [0.75, 0.25]},
            ["  75.00%  class 0", "  25.00%  class 5"],
        ),
        (
            SEGMENTS | {"probabilities": np.zeros(3, np.float32)},
            ["0:00.50 to 0:01.25  speech", "0:02.00 to 1:01.00  speech", "70.00 s heard, 59.75 s of speech"],
        ),
        (
            SEGMENTS | {"classes": [1, 0], "scores": [0.5, 0.25], "labels": (b"yes", b"no")},
            [
                "0:00.50 to 0:01.25  0.5000  yes",
                "0:02.00 to 1:01.00  0.2500  no",
                "70.00 s heard, 2 words",
            ],
        ),
        (
            {"y": np.arange(10, dtype=np.float32).reshape(2, 5), "name": (b"a", b"b")},
            ["y  FP32 [2,5]  0, 1, 2, 3, 4, 5, 6, 7, ...", "name  BYTES [2]  a, b"],
        ),
        # What a model calls its outputs is no list.
        ({"boxes": np.zeros((1, 4), np.float32)}, ["boxes  FP32 [1,4]  0, 0, 0, 0"]),
        ({"labels": (b"a",), "keypoints": [1.0]}, ["labels  BYTES [1]  a", "keypoints  FP64 [1]  1"]),
    ],
)
def test_lines(values: dict[str, Any], lines: list[str]) -> None:
    assert lines_of(answer(**values)) == lines


def test_at_most_so_many_objects() -> None:
    assert lines_of(answer(**BOXES), 1) == ["  0.7500  class 3  [1, 2, 3, 4]"]


def test_a_recording_is_summed_up_with_its_earlier_parts() -> None:
    last = answer(**SEGMENTS, probabilities=np.zeros(3, np.float32))
    assert lines_of(last, None, [Stretch(0, 1, "speech")])[-1] == "70.00 s heard, 60.75 s of speech"
    assert stretches(answer(y=[1])) == []


def test_classes_and_boxes_as_json() -> None:
    made = document(answer(**BOXES))
    assert made["boxes"][1] == {"label": "4", "score": 0.5, "index": 4, "box": [5, 6, 7, 8]}
    made = document(answer(scores=[0.5], indices=[7], labels=(b"seven",)))
    assert made["top"] == [{"label": "seven", "score": 0.5, "index": 7}]
