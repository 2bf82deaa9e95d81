"""mAP of known detections: cases that can be computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder.errors import ModelError
from builder.running.detection_accuracy import DetectionAccuracy
from edgebundle.answer import Box

CAT = (10.0, 10.0, 50.0, 60.0)
DOG = (100.0, 20.0, 180.0, 90.0)


def instances(folder: Path, **changes: Any) -> Path:
    """Two pictures; a cat and a dog in the first, a dog in the second, which is in a folder."""

    def annotated(image: int, category: int, box: tuple[float, ...]) -> dict[str, Any]:
        x0, y0, x1, y1 = box
        return {"image_id": image, "category_id": category, "bbox": [x0, y0, x1 - x0, y1 - y0]}

    document = {
        "images": [{"id": 7, "file_name": "a.jpg"}, {"id": 9, "file_name": "more/b.jpg"}],
        "annotations": [annotated(7, 17, CAT), annotated(7, 18, DOG), annotated(9, 18, DOG)],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
    }
    path = folder / "instances.json"
    path.write_text(json.dumps(document | changes))
    return path


def test_perfect_answers_count_as_one(tmp_path: Path) -> None:
    accuracy = DetectionAccuracy(instances(tmp_path))
    assert accuracy.files == [tmp_path / "a.jpg", tmp_path / "more" / "b.jpg"]
    accuracy.add(Path("a.jpg"), [Box("Cat", 0.9, 5, *CAT), Box("dog", 0.8, 6, *DOG)])
    accuracy.add(Path("elsewhere/b.jpg"), [Box("dog", 0.7, 6, *DOG)])
    assert accuracy.document() == pytest.approx(
        {"map": 1, "map50": 1, "map75": 1, "pictures": 2, "objects": 3}
    )
    assert str(accuracy) == "mAP 1.000, mAP50 1.000, mAP75 1.000 of 3 objects in 2 pictures"


def test_shifted_wrong_and_missing_objects_count_less(tmp_path: Path) -> None:
    accuracy = DetectionAccuracy(instances(tmp_path))
    x0, y0, x1, y1 = CAT  # moved by 8 of 40: intersection over union 32/48, right up to IoU 0.65
    moved = Box("cat", 0.9, 0, x0 + 8, y0, x1 + 8, y1)
    accuracy.add(Path("a.jpg"), [moved, Box("dog", 0.9, 1, *DOG), Box("zebra", 0.9, 2, *DOG)])
    accuracy.add(Path("b.jpg"), [])
    # Cat: right at 4 of 10 thresholds. Dog: one of two found, 51 of the 101 levels of recall.
    expected = (0.4 + 51 / 101) / 2
    document = accuracy.document()
    assert document["map"] == pytest.approx(expected)
    assert document["map50"] == pytest.approx((1 + 51 / 101) / 2)
    assert document["map75"] == pytest.approx((0 + 51 / 101) / 2)
    assert "; not annotated: zebra" in str(accuracy)


def test_only_pictures_that_were_asked_about_count(tmp_path: Path) -> None:
    accuracy = DetectionAccuracy(instances(tmp_path))
    accuracy.add(Path("b.jpg"), [Box("dog", 0.5, 0, *DOG)])
    assert accuracy.document()["map"] == pytest.approx(1)
    assert accuracy.document()["objects"] == 1
    assert not accuracy.has(Path("c.jpg"))


def test_classes_without_names_are_the_annotations_in_order(tmp_path: Path) -> None:
    accuracy = DetectionAccuracy(instances(tmp_path))
    accuracy.add(Path("a.jpg"), [Box("0", 0.9, 0, *CAT), Box("1", 0.9, 1, *DOG)])
    assert accuracy.document()["map"] == pytest.approx(1)


def test_nothing_found_is_zero_and_foreign_classes_are_an_error(tmp_path: Path) -> None:
    accuracy = DetectionAccuracy(instances(tmp_path))
    accuracy.add(Path("a.jpg"), [])
    assert accuracy.document()["map"] == 0
    accuracy.add(Path("a.jpg"), [Box("zebra", 0.9, 0, *CAT)])
    with pytest.raises(ModelError, match=r"expected the model's classes \(zebra\), got cat, dog"):
        accuracy.document()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"images": [], "annotations": [], "categories": []}', "[" * 100_000, "\x00",
     '{"images": [{"id": 1}], "annotations": [], "categories": [{"id": 1, "name": "x"}]}',
     '{"images": 3, "annotations": [], "categories": []}',
     '{"images": [{"id": 1, "file_name": "a"}], "categories": [{"id": 1, "name": "x"}],'
     ' "annotations": [{"image_id": 1, "category_id": 1, "bbox": [1]}]}'],
)  # fmt: skip
def test_other_files_are_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="expected annotations of COCO"):
        DetectionAccuracy(path)
    with pytest.raises(ModelError, match="expected annotations of COCO"):
        DetectionAccuracy(tmp_path / "absent.json")
