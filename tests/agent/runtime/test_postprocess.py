from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from agent.bundle.detection import Objects, Part
from agent.bundle.processing import (
    ClassMap,
    Ctc,
    Detect,
    Normalise,
    Pose,
    Postprocess,
    Softmax,
    TopK,
    real_outputs,
)
from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, FormatError
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor, detect, softmax, top_k
from agent.runtime.quantisation import to_real

RNG = np.random.default_rng(3)


def process(
    *steps: Any, labels: tuple[bytes, ...] = (), placement: Placement | None = None, **outputs: np.ndarray
) -> Any:
    specs = [TensorSpec.from_dtype(name, str(array.dtype), array.shape) for name, array in outputs.items()]
    return Postprocessor(Postprocess(steps) if steps else None, specs, labels)(outputs, placement)


def test_without_steps_outputs_are_unchanged() -> None:
    y = np.ones((1, 3), np.float32)
    assert process(y=y) == {"y": y}


def test_softmax_sums_to_one_and_does_not_overflow() -> None:
    values = np.array([[1e4, 1e4, -1e4], [0, 1, 2]], np.float32)
    result = softmax(values, -1)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result[0], [0.5, 0.5, 0])
    np.testing.assert_allclose(result.sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_allclose(softmax(values.T, 0).T, result)


@given(
    scores=hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(-5, 5, width=16)),
    data=st.data(),
)
def test_top_k_is_numpys_stable_sort(scores: np.ndarray, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, scores.size))
    expected = np.argsort(-scores, kind="stable")[:k]
    np.testing.assert_array_equal(top_k(scores, k), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int64", "float16", "float64"])
def test_top_k_of_every_dtype(dtype: str) -> None:
    scores = np.array([3, 1, 3, 0, 2], dtype)
    assert top_k(scores, 3).tolist() == [0, 2, 4]


def test_labels_and_probabilities_of_a_classifier() -> None:
    logits = RNG.standard_normal((1, 1000)).astype(np.float32)
    labels = tuple(f"class {i}".encode() for i in range(1000))
    result = process(Softmax("y"), TopK("y", 5), labels=labels, y=logits)
    probabilities = np.exp(logits[0].astype(np.float64)) / np.exp(logits[0].astype(np.float64)).sum()
    best = np.argsort(-probabilities)[:5]
    assert list(result) == ["labels", "scores", "indices"]
    assert result["labels"] == tuple(labels[i] for i in best)
    np.testing.assert_allclose(result["scores"], probabilities[best], rtol=1e-5)
    np.testing.assert_array_equal(result["indices"], best)
    assert (result["scores"].dtype, result["indices"].dtype) == (np.float32, np.int64)


def test_other_outputs_are_kept_and_two_lists_have_distinct_names() -> None:
    a, b, c = (np.arange(3, dtype=np.float32)[None] + i for i in range(3))
    result = process(TopK("a", 1), a=a, c=c)
    assert list(result) == ["scores", "indices", "c"]
    result = process(TopK("a", 1), TopK("b", 2), a=a, b=b, c=c)
    assert list(result) == ["a_scores", "a_indices", "b_scores", "b_indices", "c"]


def test_scores_that_are_not_numbers_cannot_be_ranked() -> None:
    with pytest.raises(ExecutionError, match="'y' contains NaN"):
        process(TopK("y", 1), y=np.array([[np.nan, 1]], np.float32))


@pytest.mark.parametrize(
    ("steps", "outputs", "labels"),
    [
        ((Softmax("y", 2),), {"y": np.ones((1, 3), np.float32)}, ()),
        ((Softmax("z"),), {"y": np.ones((1, 3), np.float32)}, ()),
        ((TopK("y", 4),), {"y": np.ones((1, 3), np.float32)}, ()),
        ((TopK("y", 1),), {"y": np.ones((2, 3), np.float32)}, ()),
        ((TopK("y", 1),), {"y": np.ones((), np.float32)}, ()),
        ((TopK("y", 1),), {"y": np.ones((1, 3), np.float32)}, (b"a", b"b")),
        (
            (Detect("y", "z", 0.5, 0.5, 10, "corners", True),),
            {"y": np.ones((1, 5, 4), np.float32), "z": np.ones((1, 6, 2), np.float32)},
            (),
        ),
    ],
)
def test_a_declaration_that_does_not_fit_is_refused(steps: Any, outputs: Any, labels: Any) -> None:
    with pytest.raises(FormatError):
        process(*steps, labels=labels, **outputs)


def iou(a: np.ndarray, b: np.ndarray) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - width * height
    return width * height / union if union > 0 else 0.0


def brute_force(boxes: np.ndarray, scores: np.ndarray, step: Detect) -> list[tuple[int, int]]:
    """Non-maximum suppression as it is defined, one pair at a time."""
    first = 1 if step.background else 0
    candidates = [
        (float(scores[i, c]), i, c)
        for i in range(scores.shape[0])
        for c in range(first, scores.shape[1])
        if scores[i, c] > step.score_threshold
    ]
    candidates.sort(key=lambda each: -each[0])
    kept: list[tuple[int, int]] = []
    for _, i, c in candidates:
        if all(c != other or iou(boxes[i], boxes[j]) <= step.iou_threshold for j, other in kept):
            kept.append((i, c))
    return kept[: step.max_detections]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(0, 40),
    classes=st.integers(1, 3),
    iou_threshold=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    limit=st.sampled_from([1, 5, 1000]),
    background=st.booleans(),
)
def test_detections_are_those_of_the_definition(
    seed: int, count: int, classes: int, iou_threshold: float, limit: int, background: bool
) -> None:
    rng = np.random.default_rng(seed)
    # On a coarse grid, boxes often coincide, touch and contain each other.
    low = rng.integers(0, 8, (count, 2))
    boxes = np.concatenate((low, low + rng.integers(0, 6, (count, 2))), axis=1).astype(np.float32)
    scores = rng.permutation(count * (classes + background)).astype(np.float32)
    scores = scores.reshape(count, classes + background)
    step = Detect("b", "s", 0.5, iou_threshold, limit, "corners", False, background)
    expected = brute_force(boxes, scores / max(1, scores.size), step)
    found, best, kinds = detect(boxes, scores / max(1, scores.size), step)
    np.testing.assert_array_equal(kinds, [c for _, c in expected])
    np.testing.assert_array_equal(found, boxes[[i for i, _ in expected]])
    np.testing.assert_allclose(best, [scores[i, c] / scores.size for i, c in expected], rtol=1e-6)


def test_boxes_given_by_their_centre_become_corners() -> None:
    step = Detect("b", "s", 0.5, 0.5, 10, "centre", False)
    boxes, _, _ = detect(np.array([[10, 20, 4, 6]], np.float32), np.array([[0.9]], np.float32), step)
    assert boxes.tolist() == [[8, 17, 12, 23]]


def test_boxes_are_in_pixels_of_the_image_as_sent() -> None:
    boxes = np.array([[[0.25, 0.25, 0.75, 0.75], [0, 0, 1, 1]]], np.float32)
    scores = np.array([[[0.1, 0.9], [0.2, 0.8]]], np.float32)
    step = Detect("b", "s", 0.5, 0.5, 10, "corners", True, True)
    # 200 x 100 pixels fitted into 64 x 64: scaled by 0.32, 16 rows below the top.
    placement = Placement(200, 100, 0.32, 0.32, 0, 16, 64, 64)
    result = process(step, labels=(b"nothing", b"face"), placement=placement, b=boxes, s=scores)
    assert list(result) == ["boxes", "scores", "classes", "labels"]
    np.testing.assert_allclose(result["boxes"], [[50, 0, 150, 100], [0, 0, 200, 100]], atol=1e-4)
    assert result["labels"] == (b"face", b"face")
    pixels = process(
        Detect("b", "s", 0.5, 0.5, 10, "corners", False), placement=placement, b=boxes * 64, s=scores
    )
    np.testing.assert_allclose(pixels["boxes"][0], [50, 0, 150, 100], atol=1e-4)
    raw = process(step, b=boxes, s=scores)
    np.testing.assert_array_equal(raw["boxes"], boxes[0])


def test_no_detections_give_empty_arrays() -> None:
    result = process(
        Detect("b", "s", 0.5, 0.5, 10, "corners", True),
        labels=(b"x",),
        b=np.zeros((1, 4, 4), np.float32),
        s=np.zeros((1, 4, 1), np.float32),
    )
    assert (result["boxes"].shape, result["scores"].shape, result["labels"]) == ((0, 4), (0,), ())


def test_an_embedding_has_length_one() -> None:
    y = np.array([[3, 4], [0, 0]], np.float32)
    np.testing.assert_allclose(process(Normalise("y"), y=y)["y"], np.array([[0.6, 0.8], [0, 0]]))


@pytest.mark.parametrize("shape", [(1, 7, 3), (7, 1, 3)])
def test_a_text_joins_repetitions_and_drops_blanks(shape: tuple[int, ...]) -> None:
    best = np.array([1, 1, 0, 1, 2, 2, 0])
    scores = np.eye(3, dtype=np.float32)[best] * 0.75
    result = process(Ctc("y"), labels=(b"a", "ü".encode()), y=scores.reshape(shape))
    assert list(result) == ["text", "scores"]
    assert result["text"] == ("aaü".encode(),)
    assert result["scores"].tolist() == [0.75]
    # With a line for the blank, and the blank at the end.
    assert process(Ctc("y"), labels=(b"-", b"a", b"b"), y=scores.reshape(shape))["text"] == (b"aab",)
    last = np.roll(scores, -1, axis=1).reshape(shape)
    assert process(Ctc("y", "last", "softmax"), labels=(b"a", b"b"), y=last)["text"] == (b"aab",)
    nothing = process(Ctc("y"), labels=(b"a", b"b"), y=np.eye(3, dtype=np.float32)[[0] * 7].reshape(shape))
    assert (nothing["text"], nothing["scores"].tolist()) == ((b"",), [0.0])


YOLO = Objects(
    boxes=(Part("a", 0, 4),), coding="centre", normalised=False, scores=(Part("a", 4, 3),), transposed=True,
    score_threshold=0.4, iou_threshold=0.5,
)  # fmt: skip
POSE = replace(YOLO, scores=(Part("a", 4, 1),), keypoints=(Part("a", 5, 6),), keypoint_values=3)


@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (Softmax("a"), (1, 9)),
        (TopK("a", 4), (1, 9)),
        (Normalise("a"), (1, 9)),
        (ClassMap("a"), (1, 5, 4, 6)),
        (ClassMap("a", channels_last=True), (1, 4, 6, 5)),
        (Ctc("a"), (1, 7, 5)),
        (Detect("a", "b", 0.4, 0.5, 10, "corners", normalised=False), (1, 8, 4)),
        (YOLO, (1, 7, 20)),
        (POSE, (1, 11, 20)),
    ],
)
@pytest.mark.parametrize(("dtype", "zero"), [("int8", -128), ("int8", 17), ("uint8", 0), ("uint8", 131)])
def test_quantised_outputs_give_what_their_real_numbers_give(
    step: Any, shape: tuple[int, ...], dtype: str, zero: int
) -> None:
    limits = np.iinfo(dtype)
    a = RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    b = RNG.integers(limits.min, limits.max, (1, 8, 3), dtype, endpoint=True)
    outputs = {"a": a, "b": b}
    scales = {"a": Quantised("a", 0.037, zero), "b": Quantised("b", 1 / 255, limits.min)}
    labels = tuple(b"abcdefghi") if not isinstance(step, Ctc) else tuple(b"abcd")
    names = tuple(bytes([letter]) for letter in labels)
    declared = Postprocess((step,))
    specs = [TensorSpec.from_dtype(name, str(array.dtype), array.shape) for name, array in outputs.items()]
    found = Postprocessor(declared, specs, names, real_outputs(declared, scales))(outputs)
    real = {name: to_real(array, scales[name]) for name, array in outputs.items()}
    expected = Postprocessor(declared, specs, names)(real)
    assert found.keys() == expected.keys()
    read = declared.outputs
    for name, value in expected.items():
        if name == "b" and "b" not in read:  # no step reads it: the model's own integers
            np.testing.assert_array_equal(found[name], b)
        elif isinstance(value, tuple):
            assert found[name] == value
        else:
            np.testing.assert_array_equal(found[name], value)
            assert np.asarray(found[name]).dtype == value.dtype


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("threshold", "wanted"), [(0.5, [[0, 1], [1, 0]]), (0.9, [[0, 0], [1, 0]])])
def test_one_channel_is_the_score_of_one_class(
    channels_last: bool, threshold: float, wanted: list[list[int]]
) -> None:
    scores = np.array([[0.1, 0.75], [1.0, 0.5]], np.float32)
    values = scores[None, ..., None] if channels_last else scores[None, None]
    spec = TensorSpec("mask", "FP32", values.shape)
    step = ClassMap("mask", channels_last, threshold)
    found = Postprocessor(Postprocess((step,)), [spec], [b"background", b"person"])({"mask": values})
    assert np.array_equal(np.asarray(found["class_map"]), wanted)
    assert np.asarray(found["shares"]).sum() == pytest.approx(1)
    assert set(found["labels"]) == {b"background", b"person"}


def test_a_threshold_is_compared_with_real_numbers() -> None:
    values = np.array([[[[-128, 0], [1, 127]]]], np.int8)
    spec, scale = TensorSpec("mask", "INT8", values.shape), Quantised("mask", 1 / 256, -128)
    declared = Postprocess((ClassMap("mask", threshold=0.5),))
    real = real_outputs(declared, {"mask": scale})
    found = Postprocessor(declared, [spec], (), real)({"mask": values})
    assert np.array_equal(np.asarray(found["class_map"]), [[0, 0], [1, 1]])


def test_several_channels_with_a_threshold_are_refused() -> None:
    spec = TensorSpec("mask", "FP32", (1, 3, 4, 4))
    with pytest.raises(FormatError, match="with one class, which a threshold needs"):
        Postprocessor(Postprocess((ClassMap("mask", threshold=0.5),)), [spec])
    with pytest.raises(FormatError, match="with 2 to 65536 classes"):
        Postprocessor(Postprocess((ClassMap("mask"),)), [TensorSpec("mask", "FP32", (1, 1, 4, 4))])


def test_persons_are_ranked_by_the_confidence_of_the_points_that_are_seen() -> None:
    points = np.zeros((1, 4, 3, 3), np.float32)
    points[0, 0] = [[10, 20, 0.5], [30, 5, 0.3], [900, 900, 0.05]]
    points[0, 1] = [[1, 2, 0.9], [3, 4, 0.9], [5, 6, 0.9]]
    points[0, 2] = 0.05  # no person
    points[0, 3, :, 2] = 0.2  # too weak
    result = process(Pose("y", point_threshold=0.1, score_threshold=0.25), y=points, labels=(b"person",))
    np.testing.assert_allclose(result["scores"], [0.9, 0.4])
    np.testing.assert_array_equal(result["boxes"], [[1, 2, 5, 6], [10, 5, 30, 20]])
    np.testing.assert_array_equal(result["keypoints"], points[0, [1, 0]])
    assert result["labels"] == (b"person", b"person")
    swapped = process(Pose("y", order="yx"), y=points)
    np.testing.assert_array_equal(swapped["boxes"], [[2, 1, 6, 5], [5, 10, 20, 30]])


def test_key_points_that_are_not_numbers_are_an_error() -> None:
    points = np.full((1, 1, 2, 3), 0.5, np.float32)
    points[0, 0, 1, 0] = np.nan
    with pytest.raises(ExecutionError, match="key points that are not finite"):
        process(Pose("y"), y=points)
    with pytest.raises(FormatError, match=r"expected .1,persons,points,3., got"):
        process(Pose("y"), y=np.zeros((1, 2, 3), np.float32))
    with pytest.raises(ValueError, match="order: expected"):
        Pose("y", order="zx")
    with pytest.raises(ValueError, match="score_threshold: expected 0 to 1"):
        Pose("y", score_threshold=2)


def test_key_points_far_away_stay_finite() -> None:
    points = np.full((1, 1, 2, 3), 3e38, np.float32)
    result = process(Pose("y", normalised=True), y=points, placement=Placement(8, 8, 1.0, 1.0, 0, 0, 8, 8))
    assert np.isfinite(result["keypoints"][..., :2]).all() and np.isfinite(result["boxes"]).all()
