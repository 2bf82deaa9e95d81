"""Masks as run lengths, and which part of the image they cover."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent.bundle.processing import ClassMap, Postprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError
from agent.runtime.masks import area_of_cells, cells_of_image, encode_masks, run_lengths
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor


def decoded(code: bytes, shape: tuple[int, int]) -> np.ndarray:
    """COCO's compressed run lengths, read one bit after the other."""
    counts: list[int] = []
    position = 0
    while position < len(code):
        value = shift = 0
        while True:
            bits = code[position] - 48
            position += 1
            value |= (bits & 0x1F) << shift
            shift += 5
            if not bits & 0x20:
                break
        if bits & 0x10:
            value -= 1 << shift
        counts.append(value + (counts[-2] if len(counts) > 2 else 0))
    flat = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return flat.reshape(shape[::-1]).T


@given(mask=hnp.arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))))
def test_run_lengths_are_read_again(mask: np.ndarray) -> None:
    np.testing.assert_array_equal(decoded(run_lengths(mask), mask.shape), mask)


def test_run_lengths_are_those_of_coco() -> None:
    # As pycocotools encodes these two: a long run, whose code has several characters, and short ones.
    assert run_lengths(np.zeros((480, 640), bool)) == b"PP\\9"
    assert run_lengths(np.array([[0, 1, 1], [1, 0, 1]], bool)) == b"1210"


def test_a_mask_is_inside_its_box_where_the_prototypes_are_positive() -> None:
    prototypes = np.zeros((2, 16, 16), np.float32)
    prototypes[0, :, :8], prototypes[0, :, 8:] = -1, 1
    prototypes[1] = -prototypes[0]
    weights = np.array([[1, 0], [0, 2]], np.float32)
    boxes = np.array([[8, 8, 56, 40], [0, 0, 64, 64]], np.float32)
    # The image is in the middle 48 rows of the input.
    masks = encode_masks(weights, prototypes, boxes, (64, 64), (8, 56, 0, 64))
    expected = np.zeros((48, 64), bool)
    expected[0:32, 32:56] = True
    np.testing.assert_array_equal(decoded(masks[0], (48, 64)), expected)
    expected = np.zeros((48, 64), bool)
    expected[:, :32] = True
    np.testing.assert_array_equal(decoded(masks[1], (48, 64)), expected)
    with pytest.raises(ExecutionError, match="not finite"):
        encode_masks(np.full_like(weights, np.inf), prototypes, boxes, (64, 64), (8, 56, 0, 64))


def test_the_cells_of_a_letterbox_are_those_of_the_image() -> None:
    placement = Placement(200, 100, 0.32, 0.32, 0, 16, 64, 64)
    assert cells_of_image(placement, 64, 64) == (16, 48, 0, 64)
    assert cells_of_image(placement, 16, 16) == (4, 12, 0, 16)
    np.testing.assert_allclose(area_of_cells(placement, 16, 16, (4, 12, 0, 16)), [0, 0, 200, 100], atol=1e-4)
    # A crop: only its part of the image is covered.
    crop = Placement(400, 200, 0.5, 0.5, -70, -10, 60, 80)
    cells = cells_of_image(crop, 80, 60)
    assert cells == (0, 80, 0, 60)
    np.testing.assert_allclose(area_of_cells(crop, 80, 60, cells), [140, 20, 260, 180])


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_class_map_names_its_classes(channels_last: bool) -> None:
    scores = np.zeros((1, 3, 8, 8), np.float32)
    scores[0, 2, 2:5], scores[0, 1, 5:6] = 1, 1
    if channels_last:
        scores = scores.transpose(0, 2, 3, 1)
    process = Postprocessor(
        Postprocess((ClassMap("y", channels_last),)),
        [TensorSpec("y", "FP32", scores.shape)],
        (b"a", b"b", b"c"),
    )
    # The image is in the rows 2 to 5 of 8.
    result = process({"y": scores}, Placement(200, 100, 0.32, 0.32, 0, 16, 64, 64))
    assert np.asarray(result["class_map"]).dtype == np.uint8
    assert np.asarray(result["class_map"])[:, 0].tolist() == [2, 2, 2, 1]
    assert np.asarray(result["shares"]).tolist() == [0.75, 0.25]
    assert result["labels"] == (b"c", b"b")
    np.testing.assert_allclose(np.asarray(result["area"]), [0, 0, 200, 100], atol=1e-4)
    assert np.asarray(process({"y": scores})["class_map"]).shape == (8, 8)
    with pytest.raises(ExecutionError, match="NaN"):
        process({"y": np.where(scores == 1, np.nan, scores)})
