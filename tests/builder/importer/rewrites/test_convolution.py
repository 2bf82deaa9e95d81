"""Transposed convolutions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.builder.importer.rewrites.cases import ModelMaker, one


@pytest.mark.parametrize(
    "attributes",
    [
        {"output_shape": [10, 8], "strides": [3, 2]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
        {"auto_pad": "SAME_LOWER", "strides": [2, 2]},
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
