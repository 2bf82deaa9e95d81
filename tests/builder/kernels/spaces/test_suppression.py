"""The kernel of non-maximum suppression against ONNX Runtime's, where orders and limits meet."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks.conformance.unchecked import run_as_shipped


@pytest.mark.parametrize("centred", [0, 1])
def test_equal_scores_empty_boxes_and_equal_overlaps(centred: int) -> None:
    random = np.random.default_rng(5)
    count = 37
    # A grid: many overlaps are exactly 1/3 or 0, many boxes have no area, and many scores are equal.
    boxes = random.integers(0, 4, (2, count, 4)).astype(np.float32)
    scores = (random.integers(0, 5, (2, 3, count)) / 4).astype(np.float32)
    scores[0, 0, 3] = np.inf
    node = helper.make_node(
        "NonMaxSuppression", ["b", "s", "most", "overlap", "least"], ["y"], center_point_box=centred
    )
    info = helper.make_tensor_value_info
    weights: dict[str, Any] = {
        "most": np.array([9]),
        "overlap": np.array([1 / 3], np.float32),
        "least": np.array([0.25], np.float32),
    }
    graph = helper.make_graph(
        [node],
        "g",
        [info("b", TensorProto.FLOAT, boxes.shape), info("s", TensorProto.FLOAT, scores.shape)],
        [info("y", TensorProto.INT64, [None, 3])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {"b": boxes, "s": scores}
    [wanted] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    [got] = run_as_shipped(model, feeds)
    assert len(wanted) > 30
    assert np.array_equal(got, wanted)
