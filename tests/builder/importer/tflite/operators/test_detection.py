"""Non-maximum suppression with a fixed number of results: as LiteRT, also when there are fewer boxes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flatbuffers import flexbuffers
from numpy.typing import NDArray

from builder.errors import UnsupportedOperatorError
from tests.builder.importer.tflite.litert import run_converted, run_litert
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

OPTIONS: dict[str, Any] = {
    "max_detections": 6,
    "max_classes_per_detection": 1,
    "detections_per_class": 4,
    "use_regular_nms": False,
    "nms_score_threshold": 0.3,
    "nms_iou_threshold": 0.5,
    "num_classes": 3,
    "y_scale": 10.0,
    "x_scale": 10.0,
    "h_scale": 5.0,
    "w_scale": 5.0,
}
COUNT = 40


def post_process(dtype: str = "float32", background: int = 1, **changes: Any) -> bytes:
    options = OPTIONS | changes
    graph = FileSubgraph()
    rng = np.random.default_rng(0)
    anchors = np.concatenate([rng.uniform(0, 1, (COUNT, 2)), rng.uniform(0.1, 0.4, (COUNT, 2))], axis=1)
    scales: list[dict[str, Any]] = [{}, {}]
    if dtype == "uint8":
        scales = [{"scales": [0.1], "zeros": [128]}, {"scales": [1 / 255], "zeros": [0]}]
    graph.inputs = [
        graph.tensor((1, COUNT, 4), dtype, **scales[0]),
        graph.tensor((1, COUNT, options["num_classes"] + background), dtype, **scales[1]),
    ]
    graph.outputs = [graph.tensor() for _ in range(4)]
    kept = graph.constant(anchors.astype(np.float32))
    if dtype == "uint8":
        kept = graph.constant(np.round(anchors * 255).astype(np.uint8), **scales[1])
    operands = [*graph.inputs, kept]
    graph.op(
        "TFLite_Detection_PostProcess", operands, graph.outputs, custom=bytes(flexbuffers.Dumps(options))
    )
    return write(graph)


def feeds(dtype: str = "float32", classes: int = 4, low: float = 0.0) -> list[NDArray[Any]]:
    rng = np.random.default_rng(1)
    boxes, scores = rng.uniform(-3, 3, (1, COUNT, 4)), rng.uniform(low, 1, (1, COUNT, classes))
    if dtype == "uint8":
        return [np.round(boxes / 0.1 + 128).astype(np.uint8), np.round(scores * 255).astype(np.uint8)]
    return [boxes.astype(np.float32), scores.astype(np.float32)]


@pytest.mark.parametrize(
    ("changes", "dtype", "background"),
    [
        ({}, "float32", 1),
        ({}, "float32", 0),
        ({"nms_score_threshold": 0.93}, "float32", 1),  # fewer boxes than places
        ({"nms_score_threshold": 2.0}, "float32", 1),  # none
        ({"nms_iou_threshold": 0.05, "max_detections": 25}, "float32", 1),
        ({"nms_iou_threshold": 1.0, "max_detections": 1000}, "float32", 1),
        ({"max_classes_per_detection": 2}, "float32", 1),
        ({}, "uint8", 1),
        ({"use_regular_nms": True}, "float32", 1),
        ({"use_regular_nms": True, "max_detections": 20}, "float32", 1),
        ({"use_regular_nms": True, "max_detections": 500, "detections_per_class": 300}, "uint8", 1),
        ({"use_regular_nms": True, "nms_score_threshold": 0.95}, "float32", 0),
    ],
)
def test_detections(changes: dict[str, Any], dtype: str, background: int) -> None:
    raw = post_process(dtype, background, **changes)
    given = feeds(dtype, 3 + background)
    theirs = run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    ours = run_converted(raw, given)
    assert ours[3].tolist() == theirs[3].tolist()
    count = int(ours[3][0]) * changes.get("max_classes_per_detection", 1)
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a[:, :count], b[:, :count], rtol=1e-5, atol=1e-6)
        assert not a[:, count:].any()


def suppression(
    steps: int,
    overlap: float,
    score: float,
    sigma: float | None,
    scores: NDArray[np.float32] | None = None,
) -> bytes:
    """A suppression; without `scores`, these are its second input."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((COUNT, 4))]
    data = [*graph.inputs, graph.tensor((COUNT,)) if scores is None else graph.constant(scores)]
    graph.inputs = data if scores is None else data[:1]
    limits = [graph.constant(np.asarray(value, np.float32)) for value in (overlap, score)]
    operands = [*data, graph.constant(np.asarray(steps, np.int32)), *limits]
    if sigma is None:
        graph.outputs = [graph.tensor((), "int32"), graph.tensor((), "int32")]
    else:
        operands.append(graph.constant(np.asarray(sigma, np.float32)))
        graph.outputs = [graph.tensor((), "int32"), graph.tensor(), graph.tensor((), "int32")]
    graph.op(f"NON_MAX_SUPPRESSION_V{4 if sigma is None else 5}", operands, graph.outputs)
    return write(graph)


@pytest.mark.parametrize("sigma", [None, 0.0, 0.3, 1.5])
@pytest.mark.parametrize(
    ("steps", "overlap", "score"), [(5, 0.5, 0.2), (30, 0.1, 0.5), (10, 0.9, 0.95), (20, 0.0, 0.1)]
)
def test_suppression(steps: int, overlap: float, score: float, sigma: float | None) -> None:
    raw = suppression(steps, overlap, score, sigma)
    rng = np.random.default_rng(3)
    boxes = rng.uniform(0, 1, (COUNT, 4)).astype(np.float32)
    given: list[NDArray[Any]] = [boxes, rng.uniform(0, 1, COUNT).astype(np.float32)]
    theirs = run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    for a, b in zip(run_converted(raw, given), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6 if sigma else 0)


def test_many_results() -> None:
    rng = np.random.default_rng(3)
    given: list[NDArray[Any]] = [rng.uniform(0, 1, (COUNT, 4)).astype(np.float32)]
    given.append(rng.uniform(0, 1, COUNT).astype(np.float32))
    raw = suppression(3000, 0.9, 0.1, None)
    ours, theirs = run_converted(raw, given), run_litert(raw, given)
    assert not isinstance(theirs, str), theirs
    assert ours[1] > 20
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sigma", [-1.0, np.inf, np.nan])
def test_a_sigma_that_lowers_no_score_is_refused(sigma: float) -> None:
    with pytest.raises(UnsupportedOperatorError, match="expected a sigma of at least 0"):
        run_converted(suppression(5, 0.5, 0.2, sigma), [])


def test_lowered_scores_choose_other_boxes() -> None:
    rng = np.random.default_rng(3)
    given: list[Any] = [rng.uniform(0, 1, (COUNT, 4)).astype(np.float32)]
    given.append(rng.uniform(0, 1, COUNT).astype(np.float32))
    soft, hard = (run_converted(suppression(30, 0.9, 0.1, sigma), given) for sigma in (0.1, 0.0))
    assert soft[0].tolist() != hard[0].tolist()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_detections": 2_000_000}, "expected 1 to 1048576 detections"),
        ({"max_detections": 0}, "expected 1 to 1048576 detections"),
        ({"nms_iou_threshold": -0.5}, "an overlap of at least 0"),
        ({"num_classes": "x"}, "option num_classes|cannot be read"),
        ({"y_scale": 0.0}, "scales other than 0"),
        ({"note": "x" * 5000}, "at most 4096 bytes"),
    ],
)
def test_options_that_cannot_be_used(changes: dict[str, Any], reason: str) -> None:
    raw = post_process(**({"num_classes": 3} | changes)) if "num_classes" not in changes else None
    if raw is None:
        graph = FileSubgraph()
        graph.inputs = [graph.tensor((1, COUNT, 4)), graph.tensor((1, COUNT, 4)), graph.tensor((COUNT, 4))]
        graph.outputs = [graph.tensor() for _ in range(4)]
        graph.op(
            "TFLite_Detection_PostProcess",
            graph.inputs,
            graph.outputs,
            custom=bytes(flexbuffers.Dumps(OPTIONS | changes)),
        )
        raw = write(graph)
    with pytest.raises(UnsupportedOperatorError, match=reason):
        run_converted(raw, [])
