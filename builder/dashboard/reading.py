"""An answer of a model as a page draws it: labels, boxes, masks, key points, a class map, a text, tensors.

Promises: what a device sends is bounded: objects, points, runs and shown numbers. Numbers that are not finite
become null. A result that does not have the form of its name is shown as a tensor.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, Final

from builder.dashboard.shown import number, shown
from edgebundle.answer import Answer
from edgebundle.output import Output

# More cannot be told apart in a picture.
_MAX_OBJECTS: Final = 300
_MAX_LABELS: Final = 20
_MAX_POINTS: Final = 200
# Run lengths of one mask; a mask of a model's input has at most some thousand runs.
_MAX_MASK_CHARACTERS: Final = 200_000
# A map of 1024 x 1024 classes.
_MAX_MAP: Final = 1 << 20
_MAX_VALUES: Final = 8


def read(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON that a page can draw."""
    outputs = {output.name: output for output in answer.outputs}
    timing = answer.timing
    parts = {
        "network": timing.network_s,
        "queue": timing.queue_s,
        "decode": timing.decode_s,
        "compute": timing.compute_s,
        "encode": timing.encode_s,
    }
    return {
        "version": shown(answer.version, 60),
        "latency": answer.latency_s,
        "parts": {name: part for name, part in parts.items() if part is not None},
        "labels": _labels(answer),
        "boxes": _boxes(answer),
        "map": _map(outputs),
        "text": _text(outputs),
        "tensors": [_tensor(output) for output in answer.outputs[:16]],
    }


def _labels(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"label": shown(label.label, 80), "score": number(label.score), "index": label.index}
        for label in answer.labels[:_MAX_LABELS]
    ]


def _boxes(answer: Answer) -> list[dict[str, Any]]:
    """Return the first list of objects; those whose corners are not numbers are left out."""
    prefixes = answer.lists("classes")
    if not prefixes:
        return []
    prefix = prefixes[0]
    points = _keypoints(answer, prefix)
    masks = _masks(answer, prefix)
    boxes = []
    for i, box in enumerate(answer.boxes_of(prefix)[:_MAX_OBJECTS]):
        corners = [number(edge) for edge in (box.x0, box.y0, box.x1, box.y1)]
        if None in corners:
            continue
        shape: dict[str, Any] = {
            "box": corners,
            "label": shown(box.label, 80),
            "score": number(box.score),
            "index": box.index,
        }
        if i < len(points):
            shape["points"] = points[i]
        if i < len(masks):
            shape["mask"] = masks[i]
        boxes.append(shape)
    return boxes


def _keypoints(answer: Answer, prefix: str) -> list[list[list[float | None]]]:
    output = _find(answer, f"{prefix}keypoints")
    if output is None or len(output.shape) != 3 or output.shape[2] not in (2, 3):
        return []
    count, points, size = output.shape
    flat = output.flat()
    return [
        [
            [number(value) for value in flat[(i * points + j) * size : (i * points + j + 1) * size]]
            for j in range(min(points, _MAX_POINTS))
        ]
        for i in range(min(count, _MAX_OBJECTS))
    ]


def _masks(answer: Answer, prefix: str) -> list[dict[str, Any] | None]:
    masks, size, area = (_find(answer, prefix + name) for name in ("masks", "mask_size", "mask_area"))
    if masks is None or size is None or area is None or masks.datatype != "BYTES":
        return []
    place = _area(area)
    extent = [int(value) for value in size.flat()[:2]]
    if place is None or len(extent) != 2 or not 0 < extent[0] * extent[1] <= 1 << 24 or min(extent) < 1:
        return []
    return [
        {"size": extent, "area": place, "runs": str(mask)} if len(str(mask)) <= _MAX_MASK_CHARACTERS else None
        for mask in masks.flat()[:_MAX_OBJECTS]
    ]


def _map(outputs: dict[str, Output]) -> dict[str, Any] | None:
    output, area = outputs.get("class_map"), outputs.get("area")
    if (
        output is None
        or area is None
        or len(output.shape) != 2
        or not 0 < math.prod(output.shape) <= _MAX_MAP
    ):
        return None
    place = _area(area)
    if place is None:
        return None
    values = bytes(min(255, max(0, int(value))) for value in output.flat())
    labels = outputs.get("labels")
    return {
        "size": list(output.shape),
        "area": place,
        "values": base64.b64encode(values).decode(),
        "labels": [] if labels is None else [shown(str(each), 80) for each in labels.flat()[:_MAX_LABELS]],
        "classes": [int(each) for each in _values(outputs.get("classes"), _MAX_LABELS)],
        "shares": [number(float(each)) for each in _values(outputs.get("shares"), _MAX_LABELS)],
    }


def _text(outputs: dict[str, Output]) -> str:
    output = outputs.get("text")
    if output is None or output.datatype != "BYTES":
        return ""
    return "\n".join(shown(str(each), 2000) for each in output.flat()[:_MAX_LABELS])


def _tensor(output: Output) -> dict[str, Any]:
    values = [
        shown(str(value), 40) if isinstance(value, str) else number(float(value))
        for value in _values(output, _MAX_VALUES)
    ]
    return {
        "name": shown(output.name, 80),
        "datatype": output.datatype,
        "shape": list(output.shape[:8]),
        "values": values,
    }


def _find(answer: Answer, name: str) -> Output | None:
    return next((output for output in answer.outputs if output.name == name), None)


def _values(output: Output | None, count: int) -> Sequence[Any]:
    return () if output is None else output.flat()[:count]


def _area(output: Output) -> list[float] | None:
    corners = [number(float(value)) for value in output.flat()[:4]]
    known = [corner for corner in corners if corner is not None]
    return known if len(known) == 4 else None
