"""Convolutions in float16, directly and by Winograd's algorithm, against double precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import depthwise, half_convolution, half_winograd
from tests.builder.kernels.machines import conv2d, element_machine, run
from tests.builder.kernels.signal_to_noise import decibels

# Shape, output channels, window, and the options of a convolution.
CASES: list[tuple[tuple[int, ...], int, int, dict[str, Any]]] = [
    ((1, 16, 5, 9), 24, 1, {}),
    ((1, 3, 13, 11), 20, 3, {"strides": (2, 2), "padding": (1, 1, 1, 1)}),
    ((2, 20, 6, 7), 17, 3, {"strides": (2, 1), "padding": (0, 1, 2, 1)}),
    ((1, 88, 3, 4), 9, 1, {}),
    ((1, 16, 9, 9), 8, 3, {"dilation": (2, 2), "padding": (2, 2, 2, 2)}),
    ((1, 32, 6, 6), 48, 3, {"groups": 2, "padding": (1, 1, 1, 1)}),
]


def convolve(
    shape: Sequence[int], outputs: int, window: int, options: dict[str, Any]
) -> tuple[float, set[str]]:
    """Return the signal to noise of a convolution with bias and ReLU, and its schedules."""
    rng = np.random.default_rng(3)
    x = np.maximum(rng.standard_normal(shape), 0).astype("f2")
    per_group = shape[1] // options.get("groups", 1)
    depth = per_group * window * window
    w = (rng.standard_normal((outputs, per_group, window, window)) * (2 / depth) ** 0.5).astype("f2")
    b = np.linspace(-1, 1, outputs).reshape(1, -1, 1, 1).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        sums = relax.op.nn.conv2d(v, relax.const(w), out_dtype="float32", **options)
        return relax.op.nn.relu(relax.op.add(sums, relax.const(b)))

    result = run(build, {"x": x}, element_machine())
    want = np.maximum(conv2d(x.astype("f4"), w.astype("f4"), **options) + b, 0)
    assert result.outputs[0].shape == want.shape
    return decibels(result.outputs[0], want), result.schedules


@pytest.mark.parametrize(("shape", "outputs", "window", "options"), CASES)
def test_sums_of_products_are_right_to_58_decibels(
    shape: tuple[int, ...], outputs: int, window: int, options: dict[str, Any]
) -> None:
    noise, schedules = convolve(shape, outputs, window, options)
    assert half_convolution.KIND in schedules
    assert noise > 58


@pytest.mark.slow
def test_the_depth_does_not_matter() -> None:
    noise, schedules = convolve((1, 4608, 1, 3), 8, 1, {})
    assert half_convolution.KIND in schedules
    assert noise > 58


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "outputs"), [((1, 16, 8, 8), 16), ((2, 24, 7, 5), 20)])
def test_winograds_algorithm(shape: tuple[int, ...], outputs: int) -> None:
    noise, schedules = convolve(shape, outputs, 3, {"padding": (1, 1, 1, 1)})
    assert half_winograd.KIND in schedules
    assert noise > 44


def test_a_depthwise_convolution_is_rounded_once_for_each_product() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((1, 12, 9, 7)).astype("f2")
    w = rng.standard_normal((12, 1, 3, 3)).astype("f2")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1), groups=12, out_dtype="float16")

    result = run(build, {"x": x}, element_machine())
    assert depthwise.KIND in result.schedules
    want = conv2d(x.astype("f4"), w.astype("f4"), padding=(1, 1, 1, 1), groups=12)
    assert decibels(result.outputs[0], want) > 60
