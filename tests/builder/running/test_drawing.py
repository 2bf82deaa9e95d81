"""Drawn answers: what is where, and answers of a device that are not what they claim."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import dashboard
from agent.runtime.masks import run_lengths
from builder.errors import ModelError
from builder.running.drawing import COLOURS, LIMBS, draw, encode, read_run_lengths

GREY = (100, 100, 100)


def picture(width: int = 300, height: int = 200, orientation: int = 1) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.new("RGB", (width, height), GREY).save(file, "PNG", exif=exif)
    return file.getvalue()


def drawn(results: dict[str, Any], data: bytes | None = None) -> np.ndarray:
    return np.asarray(draw(data or picture(), "image/png", results))


def objects(**more: Any) -> dict[str, Any]:
    boxes = np.array([[50, 60, 150, 160], [200, 90, 290, 190]], np.float32)
    return {"boxes": boxes, "scores": np.array([0.9, 0.5]), "classes": np.array([0, 1]), **more}


@pytest.mark.parametrize("labels", [None, (b"cat", b"dog"), np.array(["cat", "Zürich 東京"], object)])
def test_boxes_are_outlined_in_the_colour_of_their_class(labels: Any) -> None:
    pixels = drawn(objects(**({} if labels is None else {"labels": labels})))
    assert pixels.shape == (200, 300, 3)
    for x, y, colour in ((50, 100, 0), (150, 100, 0), (100, 160, 0), (200, 150, 1), (290, 150, 1)):
        assert tuple(pixels[y, x]) == COLOURS[colour], (x, y)
    assert tuple(pixels[100, 100]) == GREY
    assert (pixels[40:58, 50:90] == COLOURS[0]).all(axis=-1).any()  # the tag above the box


def test_a_picture_is_drawn_on_upright() -> None:
    pixels = drawn(objects(), picture(200, 300, orientation=6))
    assert pixels.shape == (200, 300, 3)
    assert tuple(pixels[100, 50]) == COLOURS[0]


def test_key_points_are_dots_and_hidden_ones_are_not() -> None:
    points = np.array([[[80, 80, 0.9], [120, 120, 0.1]], [[220, 110, 0.6], [280, 180, 0.5]]])
    pixels = drawn(objects(keypoints=points))
    assert tuple(pixels[80, 80]) == COLOURS[0]
    assert tuple(pixels[120, 120]) == GREY
    assert tuple(pixels[110, 220]) == COLOURS[1]
    assert tuple(drawn(objects(keypoints=points[..., :2]))[120, 120]) == COLOURS[0]


def test_masks_tint_their_area() -> None:
    mask = np.zeros((40, 60), bool)
    mask[20:28, 16:24] = True  # of a map that covers the picture at a fifth of its size
    codes = (run_lengths(mask), run_lengths(np.zeros((40, 60), bool)))
    for masks in (codes, [code.decode() for code in codes]):
        pixels = drawn(
            objects(masks=masks, mask_size=np.array([40, 60]), mask_area=np.array([0, 0, 300, 200.0]))
        )
        assert pixels[120, 100, 0] > 140
        assert pixels[120, 100, 1] < 100
        assert tuple(pixels[80, 100]) == GREY


def test_a_class_map_tints_all_but_class_0() -> None:
    class_map = np.zeros((2, 3), np.uint8)
    class_map[1, 2] = 1
    names = (b"nothing", b"road")
    results = {"class_map": class_map, "classes": np.array([0, 1]), "shares": np.array([0.8, 0.2])}
    pixels = drawn(results | {"labels": names, "area": np.array([0, 0, 300, 200], np.float32)})
    assert pixels[150, 250, 0] > 140
    assert tuple(pixels[150, 50]) == GREY


def test_classes_and_texts_become_captions() -> None:
    top = {"labels": (b"cat", b"dog"), "scores": np.array([0.9, 0.1]), "indices": np.array([3, 4])}
    assert (drawn(top) != GREY).any()
    assert (drawn({"text": (b"AB 123",), "scores": np.array([0.9])}) != GREY).any()


@pytest.mark.parametrize("results", [{}, {"embedding": np.ones(4)}, {"output_0": np.zeros((1, 3549, 85))}])
def test_an_answer_with_nothing_to_draw_is_refused(results: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="expected an answer with boxes, classes or a text to draw"):
        drawn(results)


@pytest.mark.parametrize(
    "results",
    [
        {"boxes": np.zeros((2, 3)), "scores": np.zeros(2)},
        {"boxes": np.zeros((2, 4))},
        {"boxes": np.full((1, 4), np.nan), "scores": np.zeros(1), "classes": np.zeros(1)},
        objects(masks=("x", "y"), mask_size=np.array([40, 60]), mask_area=np.array([0, 0, 300, 200])),
        objects(masks=("11", "11"), mask_size=np.array([1, 2]), mask_area=np.array([0, 0, 1e9, 1e9])),
        objects(masks=("11", "11"), mask_size=np.array([1, 2]), mask_area=np.array([0, 0, np.nan, 9])),
        {"class_map": np.zeros((2, 3, 4)), "classes": [0], "shares": [1]},
        {"class_map": np.zeros((2, 3), np.uint8), "area": [0, 0, -5, -5], "classes": [], "shares": []},
    ],
)
def test_answers_that_cannot_be_drawn_get_one_line(results: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="cannot be drawn"):
        drawn(results)


@pytest.mark.parametrize("code", [b"", b"\xff", b"1", b"oooooooooooo", b"PP\\9"])
def test_run_lengths_of_another_size_are_refused(code: bytes) -> None:
    with pytest.raises(ValueError, match="run lengths"):
        read_run_lengths(code, (3, 4))
    with pytest.raises(ValueError, match="expected a mask"):
        read_run_lengths(code, (1 << 20, 1 << 20))


def test_the_suffix_decides_the_format() -> None:
    image = Image.new("RGB", (4, 4))
    assert encode(image, ".PNG").startswith(b"\x89PNG")
    assert encode(image, ".jpg").startswith(b"\xff\xd8")
    for suffix in ("", ".txt", ".npz"):
        with pytest.raises(ModelError, match="suffix of a picture"):
            encode(image, suffix)


def test_a_person_has_limbs_between_the_points_that_are_seen() -> None:
    points = np.zeros((1, 17, 3))
    points[0, 11], points[0, 13], points[0, 15] = (100, 20, 0.9), (100, 120, 0.3), (200, 120, 0.1)
    box = {"boxes": np.array([[2.0, 2, 298, 198]]), "scores": np.array([0.9]), "classes": np.array([0])}
    pixels = drawn(box | {"keypoints": points})
    assert tuple(pixels[70, 100]) == COLOURS[0]
    assert tuple(pixels[120, 150]) == GREY
    script = (Path(dashboard.__file__).parent / "page/drawing.js").read_text()
    limbs = script.partition("LIMBS = ")[2].partition(";")[0]
    assert [tuple(limb) for limb in json.loads(limbs)] == list(LIMBS)
