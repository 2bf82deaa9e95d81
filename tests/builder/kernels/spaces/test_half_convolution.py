"""Convolutions in float16, directly and by Winograd's algorithm, against double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import depthwise, half_convolution, half_winograd, winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.target.device_target import resolve
from tests.builder.kernels.machines import conv2d, element_machine, machine, run
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


# A single chunk; sums of several chunks, because blocks are filled with zeros; a first layer on phases.
@pytest.mark.parametrize(
    ("shape", "outputs", "window", "options", "kind"),
    [
        ((1, 24, 6, 7), 20, 1, {}, half_convolution.KIND),
        ((2, 7, 9, 8), 13, 3, {"padding": (1, 1, 1, 1)}, half_convolution.KIND),
        ((1, 40, 5, 6), 48, 1, {"groups": 2}, half_convolution.KIND),
        ((1, 2, 31, 40), 64, 5, {"strides": (2, 2), "padding": (2, 2, 2, 2)}, winograd.KIND),
    ],
)
def test_few_products_are_rounded_at_once(
    shape: tuple[int, ...], outputs: int, window: int, options: dict[str, Any], kind: str
) -> None:
    rng = np.random.default_rng(5)
    per_group = shape[1] // options.get("groups", 1)
    x = rng.standard_normal(shape).astype("f2")
    w = (rng.standard_normal((outputs, per_group, window, window)) / 4).astype("f2")
    b = np.linspace(-1, 1, outputs).reshape(1, -1, 1, 1).astype("f2")

    def build(v: relax.Expr) -> relax.Expr:
        sums = relax.op.nn.conv2d(v, relax.const(w), out_dtype="float16", **options)
        return relax.op.nn.relu(relax.op.add(sums, relax.const(b)))

    result = run(build, {"x": x}, element_machine())
    assert kind in result.schedules
    assert result.outputs[0].dtype == np.float16
    want = np.maximum(conv2d(x.astype("f4"), w.astype("f4"), **options) + b.astype("f4"), 0)
    assert decibels(result.outputs[0], want) > 57


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


# Pictures of even and odd extents, several of them, padding on one side, a last block that is not full.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "outputs", "padding"),
    [
        ((1, 64, 12, 12), 64, (1, 1, 1, 1)),
        ((2, 72, 9, 13), 60, (0, 0, 1, 1)),
        ((1, 88, 7, 7), 90, (0, 1, 0, 1)),
    ],
)
def test_winograds_algorithm_at_stride_2(
    shape: tuple[int, ...], outputs: int, padding: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(winograd, "output_tile", lambda *_: (2, 2))
    noise, schedules = convolve(shape, outputs, 3, {"strides": (2, 2), "padding": padding})
    assert half_winograd.KIND in schedules
    assert noise > 54


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "outputs", "window", "padding"),
    [
        ((1, 3, 32, 32), 64, 7, 3),
        ((2, 3, 31, 27), 64, 7, 3),
        ((1, 1, 30, 45), 72, 6, 2),
        ((1, 3, 61, 52), 68, 7, 2),
    ],
)
def test_first_layers_are_computed_in_float32_by_winograds_algorithm(
    shape: tuple[int, ...], outputs: int, window: int, padding: int
) -> None:
    noise, schedules = convolve(shape, outputs, window, {"strides": (2, 2), "padding": (padding,) * 4})
    assert winograd.KIND in schedules
    assert noise > 100


def test_stride_2_takes_winograds_algorithm_where_float32_does() -> None:
    layer = Conv2d(1, 64, 56, 56, 128, (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1)
    arm, x86 = resolve("rpi5"), machine(16)
    assert half_winograd.applies(layer, 8, arm)
    assert not half_winograd.applies(layer, 32, x86)
    others = [replace(layer, in_channels=16, out_channels=16), replace(layer, strides=(2, 1))]
    assert not any(half_winograd.applies(op, 8, arm) for op in others)


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
