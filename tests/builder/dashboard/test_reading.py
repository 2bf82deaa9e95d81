"""Answers as a page draws them, from honest devices and from others."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

from builder.dashboard import reading
from edgebundle.answer import Answer, Timing
from edgebundle.output import Output


def answer(*outputs: Output) -> dict[str, Any]:
    found = Answer("a", "m", "1.0.0", tuple(outputs), Timing(0.01, 0.001, 0.002, 0.003, 0.0))
    read = reading.read(found)
    json.dumps(read, allow_nan=False)
    return read


def floats(name: str, shape: tuple[int, ...], *values: float) -> Output:
    return Output(name, "FP32", shape, struct.pack(f"<{len(values)}f", *values))


def integers(name: str, *values: int) -> Output:
    return Output(name, "INT64", (len(values),), struct.pack(f"<{len(values)}q", *values))


def texts(name: str, *values: str) -> Output:
    return Output(name, "BYTES", (len(values),), values)


def test_boxes_with_masks_and_key_points() -> None:
    read = answer(
        floats("boxes", (2, 4), 1, 2, 3, 4, math.nan, 6, 7, 8),
        floats("scores", (2,), 0.75, 0.5),
        integers("classes", 3, 4),
        texts("labels", "cat", "dog"),
        floats("keypoints", (2, 1, 3), 1, 2, 0.5, 3, 4, math.inf),
        texts("masks", "02", "11"),
        integers("mask_size", 1, 2),
        floats("mask_area", (4,), 0, 0, 10, 10),
    )
    [box] = read["boxes"]
    assert box == {
        "box": [1, 2, 3, 4],
        "label": "cat",
        "score": 0.75,
        "index": 3,
        "points": [[1, 2, 0.5]],
        "mask": {"size": [1, 2], "area": [0, 0, 10, 10], "runs": "02"},
    }
    assert read["latency"] == 0.01
    assert set(read["parts"]) == {"network", "queue", "decode", "compute", "encode"}


def test_labels_text_and_class_map() -> None:
    read = answer(texts("labels", "seven"), floats("scores", (1,), 0.9), integers("indices", 7))
    assert [(each["label"], each["index"]) for each in read["labels"]] == [("seven", 7)]
    assert answer(texts("text", "<b>A1\u202e"))["text"] == "<b>A1\ufffd"
    read = answer(
        Output("class_map", "UINT8", (1, 2), b"\x00\x02"),
        floats("area", (4,), 0, 0, 4, 2),
        integers("classes", 0, 2),
        floats("shares", (2,), 0.5, math.nan),
        texts("labels", "floor", "wall"),
    )
    assert read["map"]["values"] == "AAI="
    assert read["map"]["shares"] == [0.5, None]


def test_what_does_not_have_the_form_of_its_name_is_a_tensor() -> None:
    boxes = (floats("boxes", (1, 4), 1, 2, 3, 4), floats("scores", (1,), 1), integers("classes", 1))
    read = answer(*boxes, floats("keypoints", (2,), 1, 2), integers("masks", 1), integers("mask_size", 0, -1))
    assert set(read["boxes"][0]) == {"box", "label", "score", "index"}
    read = answer(
        *boxes,
        texts("masks", "x" * 300_000),
        integers("mask_size", 1, 1),
        floats("mask_area", (4,), 0, 0, 1, 1),
    )
    assert read["boxes"][0]["mask"] is None
    huge = Output("class_map", "UINT8", (4000, 4000), b"")
    assert answer(huge, floats("area", (4,), 0, 0, 1, 1))["map"] is None
    assert answer(floats("y", (1, 3), math.nan, 1, -math.inf))["tensors"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 3], "values": [None, 1.0, None]}
    ]
    count = 999
    many = floats("boxes", (count, 4), *range(4 * count)), floats("scores", (count,), *range(count))
    assert len(answer(*many, integers("classes", *range(count)))["boxes"]) == 300
