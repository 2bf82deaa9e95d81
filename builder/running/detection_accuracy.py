"""Accuracy of a detector on pictures whose objects are known: mean average precision, as COCO defines it.

Promises the numbers of `pycocotools`, COCO's own evaluation: a detection is right if it has the object's
class and overlaps it enough (intersection over union). The classes of a model and of the annotations are
matched by name; those of a model without labels by their number.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from builder.errors import ModelError
from edgebundle.answer import Box

_HINT: Final = "give a file such as instances_val2017.json of COCO, with the pictures that --inputs names"

# The annotations of COCO's training pictures take 470 MB, those of its 5000 validation pictures 20.
MAX_ANNOTATIONS_BYTES: Final = 1 << 30
_MOST_NAMED: Final = 5
_EXPECTED: Final = "expected annotations of COCO (JSON with images, annotations and categories)"


class DetectionAccuracy:
    """Compares detections with annotations.

    Parameters
    ----------
    path
        COCO's JSON. Its files are relative to its folder.

    Attributes
    ----------
    files
        The annotated pictures, in the order of the file.

    Raises
    ------
    ModelError
        If it cannot be read, or is something else.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path = Path(path)
        try:
            if path.stat().st_size > MAX_ANNOTATIONS_BYTES:
                raise ModelError(f"{path}: expected at most {MAX_ANNOTATIONS_BYTES} bytes", hint=_HINT)
            document = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path}: {_EXPECTED} ({str(error)[:200]})", hint=_HINT) from error
        try:
            self._images = {Path(str(each["file_name"])).name: int(each["id"]) for each in document["images"]}
            self.files = [path.parent / str(each["file_name"]) for each in document["images"]]
            self._objects = [_object(number, each) for number, each in enumerate(document["annotations"], 1)]
            names = {int(each["id"]): str(each["name"]) for each in document["categories"]}
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ModelError(
                f"{path}: {_EXPECTED}, got something else ({error!r:.80})", hint=_HINT
            ) from error
        if not self._images or not names:
            raise ModelError(f"{path}: {_EXPECTED}, got no images or no categories", hint=_HINT)
        self._names = dict(sorted(names.items()))
        self._by_name = {name.casefold(): number for number, name in self._names.items()}
        self._by_position = list(self._names)
        self._found: list[dict[str, Any]] = []
        self._seen: set[int] = set()
        self._unknown: dict[str, None] = {}

    def has(self, file: Path) -> bool:
        """Return whether a picture is annotated; only the file's name counts."""
        return file.name in self._images

    def add(self, file: Path, detections: Iterable[Box]) -> None:
        """Take what a model has found in a picture."""
        image = self._images[file.name]
        self._seen.add(image)
        for each in detections:
            category = self._category(each)
            if category is None:
                self._unknown[each.label] = None
                continue
            box = [each.x0, each.y0, each.width, each.height]
            self._found.append({"image_id": image, "category_id": category, "bbox": box, "score": each.score})

    def document(self) -> dict[str, float | int]:
        """Return the numbers: `map` (mean over IoU of 0.50 to 0.95), `map50`, `map75`, and what they are of.

        Raises
        ------
        ModelError
            If no class of the model is one of the annotations.
        """
        if self._unknown and not self._found:
            raise ModelError(
                f"{self._path}: expected the model's classes ({_some(self._unknown)}), "
                f"got {_some(self._names.values())}",
                hint="give it the labels of the annotations: edgebundle repack BUNDLE --labels FILE",
            )
        objects = [each for each in self._objects if each["image_id"] in self._seen]
        counts = {"pictures": len(self._seen), "objects": sum(not each["iscrowd"] for each in objects)}
        if not self._found or not counts["objects"]:
            return {"map": 0.0, "map50": 0.0, "map75": 0.0} | counts
        mean, at_50, at_75 = self._evaluate(objects)
        return {"map": mean, "map50": at_50, "map75": at_75} | counts

    def _evaluate(self, objects: list[dict[str, Any]]) -> tuple[float, float, float]:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        with contextlib.redirect_stdout(io.StringIO()):  # it prints a table
            truth = COCO()
            truth.dataset = {
                "info": {},
                "images": [{"id": image} for image in sorted(self._seen)],
                "categories": [{"id": number, "name": name} for number, name in self._names.items()],
                "annotations": objects,
            }
            truth.createIndex()
            evaluation = COCOeval(truth, truth.loadRes(self._found), "bbox")
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        mean, at_50, at_75 = (max(0.0, float(value)) for value in evaluation.stats[:3])
        return mean, at_50, at_75

    def _category(self, detection: Box) -> int | None:
        known = self._by_name.get(detection.label.casefold())
        is_number = detection.label in (str(detection.index), "")
        if known is None and is_number and 0 <= detection.index < len(self._by_position):
            known = self._by_position[detection.index]
        return known

    def __str__(self) -> str:
        numbers = self.document()
        line = (
            f"mAP {numbers['map']:.3f}, mAP50 {numbers['map50']:.3f}, mAP75 {numbers['map75']:.3f} "
            f"of {numbers['objects']} objects in {numbers['pictures']} pictures"
        )
        return line + (f"; not annotated: {_some(self._unknown)}" if self._unknown else "")


def _object(number: int, annotation: dict[str, Any]) -> dict[str, Any]:
    x, y, width, height = map(float, annotation["bbox"])
    return {
        "id": number,
        "image_id": int(annotation["image_id"]),
        "category_id": int(annotation["category_id"]),
        "bbox": [x, y, width, height],
        "area": float(annotation.get("area", width * height)),
        "iscrowd": int(annotation.get("iscrowd", 0)),
    }


def _some(names: Iterable[str]) -> str:
    listed = [name[:40] for name in names]
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more
