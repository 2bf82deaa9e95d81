"""An answer of a model as a page draws it: labels, boxes, masks, segments of sound, a map of classes, a text.

Promises: whatever a device sends, `read` returns JSON, and both reading and drawing it take a bounded time:
objects, points, pixels of masks and shown numbers have limits. Numbers that are not finite become null. A
result that does not have the form of its name is shown as a tensor.
"""

from __future__ import annotations

import base64
import math
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dashboard.shown import number, shown
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
# Of all masks of an answer together: a page draws them pixel by pixel.
_MAX_MASK_PIXELS: Final = 1 << 24
_MAX_VALUES: Final = 8
# A larger tensor is shown by its first values only: as numbers of Python it would take eight times its bytes.
_MAX_READ: Final = _MAX_MAP


def read(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON that a page can draw."""
    short = replace(answer, outputs=tuple(each for each in answer.outputs if _count(each) <= _MAX_READ))
    outputs = {output.name: output for output in short.outputs}
    return {
        "version": shown(answer.version, 60),
        "latency": answer.latency_s,
        "parts": answer.timing.parts_s,
        "labels": _labels(short),
        "boxes": _boxes(short, outputs),
        "map": _map(outputs),
        "segments": _segments(outputs),
        "text": _text(outputs),
        "tensors": [_tensor(output) for output in answer.outputs[:16]],
    }


def _labels(answer: Answer) -> list[dict[str, Any]]:
    return [
        {"label": shown(label.label, 80), "score": number(label.score), "index": label.index}
        for label in answer.labels[:_MAX_LABELS]
    ]


def _boxes(answer: Answer, outputs: dict[str, Output]) -> list[dict[str, Any]]:
    """Return the first list of objects; those whose corners are not numbers are left out."""
    prefixes = answer.lists("classes")
    if not prefixes:
        return []
    prefix = prefixes[0]
    points = _keypoints(outputs.get(f"{prefix}keypoints"))
    masks = _masks(outputs, prefix)
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


def _keypoints(output: Output | None) -> list[list[list[float | None]]]:
    if output is None or len(output.shape) != 3 or output.shape[2] not in (2, 3) or _is_text(output):
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


def _masks(outputs: dict[str, Output], prefix: str) -> list[dict[str, Any] | None]:
    """Return a mask for each object; None for one that is too large, or beyond what can be drawn."""
    masks = outputs.get(f"{prefix}masks")
    extent = _numbers(outputs.get(f"{prefix}mask_size"), 2)
    place = _numbers(outputs.get(f"{prefix}mask_area"), 4)
    if masks is None or not _is_text(masks) or len(extent) != 2 or len(place) != 4:
        return []
    height, width = map(int, extent)
    if min(height, width) < 1 or height * width > _MAX_MASK_PIXELS:
        return []
    drawn = min(_MAX_OBJECTS, _MAX_MASK_PIXELS // (height * width))
    return [
        {"size": [height, width], "area": place, "runs": str(mask)}
        if len(str(mask)) <= _MAX_MASK_CHARACTERS
        else None
        for mask in masks.first(drawn)
    ]


def _segments(outputs: dict[str, Output]) -> list[dict[str, Any]] | None:
    """Return what was heard in a recording: the first list of segments, in seconds; None if there is none."""
    name = next((name for name in outputs if name == "segments" or name.endswith("_segments")), "segments")
    output, prefix = outputs.get(name), name.removesuffix("segments")
    if output is None or _is_text(output) or output.shape[1:] != (2,):
        return None
    edges = _values(output, 2 * _MAX_OBJECTS)
    labels = _texts(outputs.get(f"{prefix}labels"), 80, _MAX_OBJECTS)
    scores = _values(outputs.get(f"{prefix}scores"), _MAX_OBJECTS)
    classes = _values(outputs.get(f"{prefix}classes"), _MAX_OBJECTS)
    return [
        {
            "start": start,
            "end": end,
            "label": labels[i] if i < len(labels) else "",
            "score": scores[i] if i < len(scores) else None,
            "index": int((classes[i] if i < len(classes) else None) or 0),
        }
        for i, (start, end) in enumerate(zip(edges[::2], edges[1::2], strict=False))
        if start is not None and end is not None
    ]


def _map(outputs: dict[str, Output]) -> dict[str, Any] | None:
    output = outputs.get("class_map")
    place = _numbers(outputs.get("area"), 4)
    if output is None or _is_text(output) or len(place) != 4 or len(output.shape) != 2:
        return None
    classes = output.values
    if not 0 < classes.size <= _MAX_MAP or not np.isfinite(classes).all():
        return None
    return {
        "size": list(output.shape),
        "area": place,
        "values": base64.b64encode(np.clip(classes, 0, 255).astype(np.uint8).tobytes()).decode(),
        "labels": _texts(outputs.get("labels"), 80),
        "classes": [int(each) for each in _numbers(outputs.get("classes"), _MAX_LABELS)],
        "shares": [number(each) for each in _values(outputs.get("shares"), _MAX_LABELS)],
    }


def _text(outputs: dict[str, Output]) -> str:
    return "\n".join(_texts(outputs.get("text"), 2000))


def _tensor(output: Output) -> dict[str, Any]:
    return {
        "name": shown(output.name, 80),
        "datatype": output.datatype,
        "shape": list(output.shape[:8]),
        "values": _texts(output, 40, _MAX_VALUES) if _is_text(output) else _values(output, _MAX_VALUES),
    }


def _count(output: Output) -> int:
    return math.prod(output.shape)


def _is_text(output: Output) -> bool:
    return output.datatype == "BYTES"


def _texts(output: Output | None, limit: int, count: int = _MAX_LABELS) -> list[str]:
    """Return the first texts of an output; nothing for one of numbers."""
    if output is None or not _is_text(output):
        return []
    return [shown(str(each), limit) for each in output.first(count)]


def _values(output: Output | None, count: int) -> list[float | None]:
    """Return the first numbers of an output, None for one that is not finite; nothing for texts."""
    if output is None or _is_text(output):
        return []
    return [number(float(value)) for value in output.first(count)]


def _numbers(output: Output | None, count: int) -> list[float]:
    """Return the first numbers of an output; nothing if it has texts, or if one of them is not finite."""
    known = [value for value in _values(output, count) if value is not None]
    return known if output is not None and len(known) == min(count, _count(output)) else []
