"""Answers as a page draws them, from honest devices and from others."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from dashboard import reading
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
    assert answer(texts("text", "<b>A1\u202e"))["text"] == "<b>A1?"
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
    huge = Output("class_map", "UINT8", (4000, 4000), b"\1" * 16_000_000)
    assert answer(huge, floats("area", (4,), 0, 0, 1, 1))["map"] is None
    assert answer(floats("y", (1, 3), math.nan, 1, -math.inf))["tensors"] == [
        {"name": "y", "datatype": "FP32", "shape": [1, 3], "values": [None, 1.0, None]}
    ]
    count = 999
    many = floats("boxes", (count, 4), *range(4 * count)), floats("scores", (count,), *range(count))
    assert len(answer(*many, integers("classes", *range(count)))["boxes"]) == 300


HOSTILE = (math.nan, math.inf, -math.inf, 1e300)
SHAPES = {
    "indices": (1,), "classes": (1,), "scores": (1,), "boxes": (1, 4), "mask_size": (2,), "mask_area": (4,),
    "class_map": (1, 2), "area": (4,), "shares": (1,), "keypoints": (1, 1, 2), "segments": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("name", SHAPES)
def test_every_number_of_a_device_may_be_none(name: str, value: float) -> None:
    """Also as texts, and in every other output that a list needs."""
    outputs = {
        each: Output(each, "FP64", shape, struct.pack(f"<{math.prod(shape)}d", *[1.0] * math.prod(shape)))
        for each, shape in SHAPES.items()
    } | {"masks": texts("masks", "01"), "labels": texts("labels", "cat")}
    assert answer(*outputs.values())["boxes"]
    count = math.prod(SHAPES[name])
    wrong = Output(name, "FP64", SHAPES[name], struct.pack(f"<{count}d", *[value] * count))
    answer(*(outputs | {name: wrong}).values())
    answer(*(outputs | {name: Output(name, "BYTES", SHAPES[name], ("x",) * count)}).values())


def test_a_huge_answer_is_read_by_its_first_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_READ", 1000)
    count = 5000
    monkeypatch.setattr(Output, "flat", lambda _self: pytest.fail("all of it"))
    read = answer(
        floats("scores", (count,), *range(count)),
        integers("classes", *range(count)),
        floats("boxes", (count, 4), *range(4 * count)),
    )
    assert (read["boxes"], read["tensors"][0]["values"]) == ([], [float(i) for i in range(8)])


def test_masks_take_a_bounded_time_to_draw() -> None:
    count = 40
    read = answer(
        floats("boxes", (count, 4), *range(4 * count)),
        floats("scores", (count,), *range(count)),
        integers("classes", *range(count)),
        texts("masks", *["0"] * count),
        integers("mask_size", 1 << 10, 1 << 10),
        floats("mask_area", (4,), 0, 0, 1, 1),
    )
    assert sum("mask" in box for box in read["boxes"]) == 16


def test_segments_of_sound() -> None:
    seconds = Output("segments", "FP64", (2, 2), struct.pack("<4d", 0.5, 1.25, 2, math.nan))
    [heard] = answer(seconds, texts("labels", "yes", "no"), floats("scores", (2,), 0.75, 0.5))["segments"]
    assert heard == {"start": 0.5, "end": 1.25, "label": "yes", "score": 0.75, "index": 0}
    speech = Output("vad_segments", "FP64", (1, 2), struct.pack("<2d", 0, 1))
    assert answer(speech)["segments"] == [{"start": 0, "end": 1, "label": "", "score": None, "index": 0}]
    assert answer(Output("segments", "FP64", (0, 2), b""))["segments"] == []
    assert answer(floats("segments", (3,), 1, 2, 3))["segments"] is None
