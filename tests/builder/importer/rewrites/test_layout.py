"""Operators that only move elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import Case, ModelMaker, check_case, one

CASES: dict[str, Case] = {
    "split with an empty part": (
        one("Split", ["x", "s"], ["y", "empty"], axis=2), {"s": np.array([4, 0])}, [2, 3, 4],
    ),
    "reversed sequences": (
        one("ReverseSequence", ["x", "n"], batch_axis=0, time_axis=1), {"n": np.array([2, 3])}, [2, 3, 4],
    ),
    "reversed sequences, time first": (
        one("ReverseSequence", ["x", "n"]), {"n": np.array([2, 1, 2])}, [2, 3, 4],
    ),
    "one axis more, a scalar": (one("Unsqueeze", ["x", "a"]), {"a": np.array(-2)}, [2, 3, 1, 4]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)], ids=str)
def test_sequences_are_reversed_by_lengths_of_the_request(
    make_model: ModelMaker, noise: Any, agrees: Any, axes: tuple[int, int]
) -> None:
    node = one("ReverseSequence", ["x", "n"], batch_axis=axes[0], time_axis=axes[1])
    lengths = np.array([1, 4, 3, 2])
    inputs = {"x": [4, 4, 3], "n": ([4], onnx.TensorProto.INT64)}
    agrees(make_model([node], inputs, {"y": [4, 4, 3]}), noise(4, 4, 3), lengths)


@pytest.mark.parametrize("pads", [[1, 2, 0, 0, 1, 3], [0, 2, -1, 0, -1, 2], [0, 7, 0, 0, 0, 9]])
def test_a_pad_that_wraps_around(make_model: ModelMaker, noise: Any, agrees: Any, pads: list[int]) -> None:
    shape = [extent + pads[axis] + pads[axis + 3] for axis, extent in enumerate((2, 3, 4))]
    node = one("Pad", ["x", "p"], mode="wrap")
    agrees(
        make_model([node], {"x": [2, 3, 4]}, {"y": shape}, {"p": np.array(pads)}, opset=19), noise(2, 3, 4)
    )


@pytest.mark.parametrize(("shape", "pads"), [([2, 0, 3], [0, 0, 1, 2, 0, 0]), ([0, 4], [0, 1, 0, 2])])
def test_a_pad_that_wraps_nothing_around(make_model: ModelMaker, shape: list[int], pads: list[int]) -> None:
    whole = [sum(each) for each in zip(shape, pads[: len(shape)], pads[len(shape) :], strict=True)]
    node = one("Pad", ["x", "p"], mode="wrap")
    model = make_model([node], {"x": shape}, {"y": whole}, {"p": np.array(pads)}, opset=19)
    (output,) = import_onnx(model, input_shapes={"x": shape}).outputs  # ONNX Runtime refuses it
    assert list(output.shape) == whole


@pytest.mark.parametrize("pads", [[1, 0, 0, 0], [0, 0, 2, 1]])
def test_a_pad_with_nothing_to_wrap_is_refused(make_model: ModelMaker, pads: list[int]) -> None:
    node = one("Pad", ["x", "p"], mode="wrap")
    model = make_model([node], {"x": [0, 4]}, {"y": [None, None]}, {"p": np.array(pads)}, opset=19)
    with pytest.raises(ModelError, match="expected elements to wrap around along axis 0, got none"):
        import_onnx(model, input_shapes={"x": [0, 4]})


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("shape", [[1, 2, 1, 4], [1, 2, 3, 1], [2, 1, 1, 1]], ids=str)
def test_one_row_that_is_reflected(
    make_model: ModelMaker, noise: Any, agrees: Any, mode: str, shape: list[int]
) -> None:
    node = one("GridSample", ["x", "g"], mode=mode, padding_mode="reflection", align_corners=1)
    grid = np.random.default_rng(3).uniform(-2, 2, (shape[0], 5, 3, 2)).astype(np.float32)
    agrees(make_model([node], {"x": shape}, {"y": [None] * 4}, {"g": grid}), noise(*shape))


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("shape", [[1, 2, 3, 4], [1, 1, 1, 5], [1, 1, 2, 3, 4]], ids=str)
def test_the_nearest_element_is_found_before_it_is_reflected(
    make_model: ModelMaker, noise: Any, agrees: Any, corners: int, shape: list[int]
) -> None:
    """Half-way between two elements, beyond an edge, the order tells them apart."""
    node = one("GridSample", ["x", "g"], mode="nearest", padding_mode="reflection", align_corners=corners)
    axes = len(shape) - 2
    lines = np.tile(np.linspace(-4, 4, 17, dtype=np.float32), axes * axes)
    grid = np.append(lines, [np.inf, -np.inf, np.nan][:axes]).astype(np.float32)
    grid = grid[: grid.size // axes * axes].reshape(1, *[1] * (axes - 1), -1, axes)
    outputs = {"y": [None] * len(shape)}
    agrees(make_model([node], {"x": shape}, outputs, {"g": grid}, opset=20), noise(*shape))
