"""Convolutions whose padding follows from the shape of their output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from builder.importer import import_onnx
from builder.importer.onnx_graph import attributes
from tests.builder.importer.rewrites.cases import ModelMaker, one, operators


@pytest.mark.parametrize(
    "attributes",
    [
        {"output_shape": [10, 8], "strides": [3, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [4, 5]},
        {"auto_pad": "SAME_LOWER", "strides": [4, 2]},
        {"strides": [2, 2], "output_padding": [1, 1], "pads": [1, 0, 0, 1]},
    ],
    ids=str,
)
def test_transposed_convolution(
    make_model: ModelMaker, noise: Any, agrees: Any, attributes: dict[str, Any]
) -> None:
    node = one("ConvTranspose", ["x", "w"], **attributes)
    agrees(
        make_model([node], {"x": [1, 2, 3, 4]}, {"y": [None] * 4}, {"w": noise(2, 3, 3, 3)}),
        noise(1, 2, 3, 4),
    )


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("how", [{}, {"strides": [2, 3]}, {"group": 2, "strides": [2, 1]}], ids=str)
def test_convolution_with_the_shape_of_its_input(
    make_model: ModelMaker, noise: Any, agrees: Any, mode: str, how: dict[str, Any]
) -> None:
    node = one("Conv", ["x", "w"], auto_pad=mode, **how)
    weights = noise(4, 4 // how.get("group", 1), 4, 3)
    model = make_model([node], {"x": [2, 4, 7, 8]}, {"y": [None] * 4}, {"w": weights})
    agrees(model, noise(2, 4, 7, 8))
    imported = import_onnx(model).mod
    assert len(imported.functions) == 1  # nothing but the convolution, which pads by itself


def test_dilated_rows_with_the_shape_of_their_input(make_model: ModelMaker, noise: Any) -> None:
    node = one("Conv", ["x", "w"], auto_pad="SAME_UPPER", dilations=[3])
    model = make_model([node], {"x": [1, 3, 9]}, {"y": [None] * 3}, {"w": noise(5, 3, 4)})
    taken = import_onnx(model).onnx  # ONNX Runtime takes no dilation with `auto_pad`
    assert [attributes(each)["pads"] for each in taken.graph.node] == [[4, 5]]


def test_bytes_with_the_shape_of_their_input(make_model: ModelMaker, agrees: Any) -> None:
    random = np.random.default_rng(0)
    node = one("ConvInteger", ["x", "w", "zero"], auto_pad="SAME_LOWER")
    weights = {"w": random.integers(0, 255, (4, 3, 2, 2), np.uint8), "zero": np.uint8(7)}
    model = make_model(
        [node],
        {"x": ([1, 3, 5, 6], TensorProto.UINT8)},
        {"y": ([None] * 4, TensorProto.INT32)},
        weights,
    )
    taken = agrees(model, random.integers(0, 255, (1, 3, 5, 6), np.uint8))
    assert "ConvInteger" in operators(taken)  # not one of float32
