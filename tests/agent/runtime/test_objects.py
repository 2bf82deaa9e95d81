"""Decoding of detectors: limits, hostile outputs, scores, suppression. The builder tests the encodings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bundle.detection import Level, Objects, Part
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, FormatError
from agent.runtime.objects import Found, ObjectDecoder
from agent.runtime.suppression import MAX_CANDIDATES

SIMPLE = Objects(
    boxes=(Part("y", 0, 4),), coding="corners", scores=(Part("y", 5, 3),), objectness=(Part("y", 4, 1),)
)
GRID = replace(SIMPLE, coding="grid", levels=(Level(5, 10, 8.0),))
DISTANCES = Objects(
    boxes=(Part("y", 0, 32),), coding="distances", bins=8, levels=(Level(5, 10, 8.0),), offset=0.5,
    scores=(Part("y", 32, 3),), activation="sigmoid", multi_label=True,
)  # fmt: skip
ANCHORS = Objects(
    boxes=(Part("y", 0, 4),), coding="anchors", variances=(0.1, 0.2), keypoints=(Part("y", 6, 6),),
    levels=(Level(5, 5, 8.0, ((8.0, 8.0), (16.0, 9.0))),), scores=(Part("y", 4, 2),), background="first",
    activation="softmax", keypoint_values=3,
)  # fmt: skip


def decode(step: Objects, **outputs: Any) -> Found:
    arrays = {name: np.asarray(value, np.float32) for name, value in outputs.items()}
    specs = {name: TensorSpec(name, "FP32", array.shape) for name, array in arrays.items()}
    return ObjectDecoder(step, specs)(arrays)


def rows(*values: list[float]) -> list[list[list[float]]]:
    return [[list(each) for each in values]]


def test_scores_are_objectness_times_class_and_only_the_best_class_counts() -> None:
    found = decode(SIMPLE, y=rows([0, 0, 9, 9, 0.5, 0.8, 0.9, 0.1], [50, 0, 60, 9, 1, 0.26, 0, 0]))
    np.testing.assert_allclose(found.scores, [0.45, 0.26])
    assert found.classes.tolist() == [1, 0]
    assert found.boxes.tolist() == [[0, 0, 9, 9], [50, 0, 60, 9]]


def test_multi_label_lists_each_class_over_the_threshold() -> None:
    found = decode(replace(SIMPLE, multi_label=True), y=rows([0, 0, 9, 9, 0.5, 0.8, 0.9, 0.1]))
    assert found.classes.tolist() == [1, 0]
    np.testing.assert_allclose(found.scores, [0.45, 0.4])


def test_suppression_is_within_a_class_unless_it_is_class_agnostic() -> None:
    two = rows([0, 0, 9, 9, 1, 0.8, 0, 0], [0, 0, 9, 8, 1, 0, 0.7, 0])
    assert decode(SIMPLE, y=two).classes.tolist() == [0, 1]
    assert decode(replace(SIMPLE, class_agnostic=True), y=two).classes.tolist() == [0]
    same = rows([0, 0, 9, 9, 1, 0.8, 0, 0], [0, 0, 9, 8, 1, 0.7, 0, 0])
    assert len(decode(SIMPLE, y=same).boxes) == 1
    assert len(decode(replace(SIMPLE, iou_threshold=1.0), y=same).boxes) == 2
    assert len(decode(replace(SIMPLE, iou_threshold=1.0, max_detections=1), y=same).boxes) == 1


def test_class_ids_are_the_models_own() -> None:
    step = Objects(
        boxes=(Part("y", 0, 4),), coding="corners", scores=(Part("y", 4, 1),), class_ids=(Part("y", 5, 1),)
    )
    assert decode(step, y=rows([0, 0, 9, 9, 0.9, 79])).classes.tolist() == [79]
    for bad in (-1, np.nan, np.inf, 1e9):
        with pytest.raises(ExecutionError, match="class ids that are no class"):
            decode(step, y=rows([0, 0, 9, 9, 0.9, bad]))


@pytest.mark.parametrize("shape", [(50, 8), (1, 50, 8), (1, 8, 5, 10)])
def test_outputs_of_any_usual_shape_are_read(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).random((50, 8)).astype(np.float32)
    expected = decode(GRID, y=values[None])
    arranged = values.T.reshape(shape) if len(shape) == 4 else values.reshape(shape)
    found = decode(GRID, y=arranged)
    np.testing.assert_array_equal(found.boxes, expected.boxes)
    transposed = decode(replace(GRID, transposed=True), y=values.T[None])
    np.testing.assert_array_equal(transposed.boxes, expected.boxes)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (SIMPLE, (1, 50, 7)),
        (SIMPLE, (2, 50, 8)),
        (SIMPLE, (8,)),
        (SIMPLE, (1, 0, 8)),
        (SIMPLE, (1, 2, 8, 5, 10)),
        (GRID, (1, 49, 8)),
        (replace(SIMPLE, transposed=True), (1, 7, 50)),
        (SIMPLE, (1, (1 << 20) + 1, 8)),
        (replace(SIMPLE, mask_weights=(Part("y", 6, 2),), prototypes="y"), (1, 50, 8)),
    ],
)
def test_outputs_that_do_not_fit_are_refused(step: Objects, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match=r"objects: expected .*, got "):
        ObjectDecoder(step, {"y": TensorSpec("y", "FP32", shape)})


def test_quantities_must_have_the_same_number_of_rows() -> None:
    step = replace(SIMPLE, scores=(Part("s", 0, 3),))
    specs = {"y": TensorSpec("y", "FP32", (1, 50, 8)), "s": TensorSpec("s", "FP32", (1, 49, 3))}
    with pytest.raises(FormatError, match="expected 49 rows, as the scores have, got 50 of boxes"):
        ObjectDecoder(step, specs)


@settings(max_examples=60, deadline=None)
@given(
    step=st.sampled_from([SIMPLE, GRID, DISTANCES, ANCHORS]),
    seed=st.integers(0, 2**32),
    scale=st.sampled_from([1.0, 1e4, 1e30, 3e38]),
    special=st.sampled_from([None, np.nan, np.inf, -np.inf]),
)
def test_whatever_a_model_computes_is_an_answer_in_range_or_an_error(
    step: Objects, seed: int, scale: float, special: float | None
) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.uniform(-1, 1, (1, 50, 35)) * scale).astype(np.float32)
    if special is not None:
        values[rng.random(values.shape) < 0.05] = special
    try:
        found = decode(step, y=values)
    except ExecutionError as error:
        assert "'y'" in str(error)
        return
    assert len(found.boxes) == len(found.scores) == len(found.classes) <= step.max_detections
    assert np.isfinite(found.boxes).all()
    assert np.isfinite(found.scores).all()
    assert (np.diff(found.scores) <= 0).all()


def test_time_and_memory_are_bounded_when_every_row_is_an_object() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate(
        (rng.random((20000, 4)) * 1e4, np.ones((20000, 1)), rng.random((20000, 3))), axis=1
    )
    step = replace(SIMPLE, multi_label=True, score_threshold=0.0, max_detections=100_000, iou_threshold=1.0)
    found = decode(step, y=values[None])
    assert len(found.boxes) == MAX_CANDIDATES
    best = np.sort(values[:, 5:].astype(np.float32).ravel())[::-1][:MAX_CANDIDATES]
    np.testing.assert_array_equal(found.scores, best)


def test_heads_are_read_as_the_network_ends_without_any_decoding() -> None:
    """YOLOv8's three heads: 16 bins a side, distances from a cell's middle, logits."""
    sizes = {"p3": (4, 6, 8.0), "p4": (2, 3, 16.0), "p5": (1, 2, 32.0)}
    outputs = {name: np.full((1, 64 + 2, h, w), -9.0) for name, (h, w, _) in sizes.items()}
    # In the cell in row 1, column 2 of p4: 1.5, 0.5, 2, 1 strides to the four sides; class 1 with 0.75.
    for side, distance in enumerate((1.5, 0.5, 2.0, 1.0)):
        bins = np.full(16, -40.0)
        bins[int(distance)] = 0
        if distance % 1:
            bins[int(distance) + 1] = 0
        outputs["p4"][0, 16 * side : 16 * side + 16, 1, 2] = bins
    outputs["p4"][0, 64 + 1, 1, 2] = np.log(3)
    step = Objects(
        boxes=tuple(Part(name, 0, 64) for name in sizes),
        coding="distances",
        bins=16,
        levels=tuple(Level(*size) for size in sizes.values()),
        offset=0.5,
        scores=tuple(Part(name, 64, 2) for name in sizes),
        activation="sigmoid",
    )
    found = decode(step, **outputs)
    assert found.classes.tolist() == [1]
    np.testing.assert_allclose(found.scores, [0.75], rtol=1e-6)
    np.testing.assert_allclose(found.boxes, [[40 - 24, 24 - 8, 40 + 32, 24 + 16]], atol=0.05)
