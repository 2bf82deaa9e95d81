"""Poolings whose padding follows from the shape of their output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.builder.importer.rewrites.cases import ModelMaker, one

# The last window of the rows begins in the padding at the end, or beyond the input; that of the columns not.
LEFT_OUT = [
    {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel_shape": [1, 3], "strides": [3, 2], "pads": [0, 1, 0, 1]},
    {"kernel_shape": [2, 3], "strides": [3, 2], "dilations": [2, 1], "pads": [1, 0, 1, 1]},
]
OPERATORS = [("MaxPool", {}), ("AveragePool", {}), ("AveragePool", {"count_include_pad": 1}), ("LpPool", {})]


@pytest.mark.parametrize("opset", [19, 22])
@pytest.mark.parametrize("window", LEFT_OUT, ids=str)
@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_a_window_that_would_begin_in_the_padding_is_left_out(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, how: dict[str, Any], window: Any, opset: int
) -> None:
    nodes = [
        one(op, ["x"], ["p"], ceil_mode=1, **window, **how),
        helper.make_node("Relu", ["p"], ["y"], name="relu"),
    ]
    agrees(make_model(nodes, {"x": [1, 2, 5, 8]}, {"y": [None] * 4}, opset=opset), noise(1, 2, 5, 8))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_norm_counts_no_place_beyond_the_input(
    make_model: ModelMaker, noise: Any, agrees: Any, p: int
) -> None:
    node = one("LpPool", ["x"], p=p, kernel_shape=[3, 2], strides=[2, 3], ceil_mode=1)
    agrees(make_model([node], {"x": [1, 2, 6, 7]}, {"y": [None] * 4}, opset=19), noise(1, 2, 6, 7))


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize(("op", "how"), OPERATORS, ids=str)
def test_the_output_has_the_shape_of_the_input(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, how: dict[str, Any], mode: str
) -> None:
    node = one(op, ["x"], kernel_shape=[3, 2], strides=[2, 1], auto_pad=mode, **how)
    agrees(make_model([node], {"x": [1, 2, 6, 7]}, {"y": [None] * 4}, opset=19), noise(1, 2, 6, 7))


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_regions_are_scaled_before_half_a_pixel_is_subtracted(
    make_model: ModelMaker, noise: Any, agrees: Any, mode: str
) -> None:
    window: dict[str, Any] = {
        "output_height": 3,
        "output_width": 2,
        "sampling_ratio": 2,
        "spatial_scale": 0.25,
    }
    node = one("RoiAlign", ["x", "r", "b"], coordinate_transformation_mode=mode, **window)
    regions = np.array([[1, 2, 25, 21], [0, 0, 32, 32]], np.float32)
    weights = {"b": np.array([1, 0], np.int64)}
    agrees(
        make_model([node], {"x": [2, 3, 8, 8], "r": [2, 4]}, {"y": [None] * 4}, weights),
        noise(2, 3, 8, 8),
        regions,
    )
