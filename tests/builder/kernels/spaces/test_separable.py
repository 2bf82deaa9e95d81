"""A depthwise convolution and the 1x1 convolution after it as one kernel, against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import separable, shares
from builder.kernels.spaces.separable import Pair
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import (
    Randn,
    Result,
    close,
    conv2d,
    element_machine,
    machine,
    narrow_and_wide,
    run,
)


def clipped(value: relax.Expr) -> relax.Expr:
    return relax.op.clip(value, 0, 6)


def separate(
    x: np.ndarray, w: np.ndarray, v: np.ndarray, target: DeviceTarget, *, residual: bool, **how: Any
) -> Result:
    """Run both convolutions, each with a bias and a clip, and compare them with their definition."""
    o = v.shape[0]
    b, c = (np.linspace(-1, 1, n, dtype="f4").reshape(1, n, 1, 1) for n in (w.shape[0], o))

    def build(p: relax.Expr, *others: relax.Expr) -> relax.Expr:
        first = clipped(relax.op.add(relax.op.nn.conv2d(p, relax.const(w), **how), relax.const(b)))
        second = relax.op.add(relax.op.nn.conv2d(first, relax.const(v)), relax.const(c))
        return relax.op.add(second, others[0]) if residual else clipped(second)

    want = conv2d(np.clip(conv2d(x, w, **how) + b, 0, 6), v) + c
    inputs = {"x": x}
    if residual:
        inputs["r"] = np.random.RandomState(3).randn(*want.shape).astype("f4")
    result = run(build, inputs, target)
    close(result.outputs[0], want + inputs["r"] if residual else np.clip(want, 0, 6))
    return result


# Batch, channels, height, width, outputs, window, stride, residual.
CASES = {
    "MobileNet": (1, 32, 32, 32, 24, 3, 1, False),
    "a residual": (1, 32, 32, 32, 32, 3, 1, True),
    "stride 2": (1, 48, 56, 56, 24, 3, 2, False),
    "a large window": (1, 24, 56, 40, 12, 5, 1, False),
    "stride 2 and a large window": (1, 24, 112, 41, 12, 5, 2, False),
    "odd extents": (1, 21, 75, 29, 13, 3, 1, False),
    "a batch": (3, 20, 19, 14, 9, 3, 1, True),
    "few channels": (1, 3, 40, 33, 2, 3, 1, False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lanes"), narrow_and_wide(CASES))
def test_both_convolutions_are_one_kernel(name: str, lanes: int, randn: Randn) -> None:
    batch, channels, height, width, outputs, window, stride, residual = CASES[name]
    x, w = randn(batch, channels, height, width), randn(channels, 1, window, window)
    v = randn(outputs, channels, 1, 1)
    how: dict[str, Any] = {"strides": (stride,) * 2, "padding": (window // 2,) * 4, "groups": channels}
    result = separate(x, w, v, machine(lanes), residual=residual, **how)
    assert separable.KIND in result.schedules
    assert not result.schedules & {"depthwise", "conv2d"}


@pytest.mark.parametrize("name", ["MobileNet", "odd extents"])
def test_operands_held_in_registers(name: str, randn: Randn) -> None:
    batch, channels, height, width, outputs, window, stride, _ = CASES[name]
    x, w = randn(batch, channels, height, width), randn(channels, 1, window, window)
    v = randn(outputs, channels, 1, 1)
    how: dict[str, Any] = {"strides": (stride,) * 2, "padding": (window // 2,) * 4, "groups": channels}
    assert separable.KIND in separate(x, w, v, element_machine(), residual=False, **how).schedules


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_shape_agrees_with_its_definition(data: st.DataObject) -> None:
    draw = data.draw
    channels, outputs = draw(st.integers(2, 40)), draw(st.integers(1, 40))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    how: dict[str, Any] = {
        "strides": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "padding": draw(st.tuples(*[st.integers(0, 2)] * 4)),
        "groups": channels,
    }
    size = draw(st.integers(1, 3)), channels, draw(st.integers(9, 50)), draw(st.integers(9, 30))
    state = np.random.RandomState(draw(st.integers(0, 99)))
    x, w = state.randn(*size).astype("f4"), state.randn(channels, 1, *kernel).astype("f4")
    v = state.randn(outputs, channels, 1, 1).astype("f4")
    residual = draw(st.booleans())
    separate(x, w, v, machine(draw(st.sampled_from([4, 8, 16]))), residual=residual, **how)


@pytest.mark.parametrize("padding", [(0, 0, 1, 0), (0, 0, 0, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3)])
def test_windows_with_gaps_between_them(
    padding: tuple[int, int, int, int], kernel: tuple[int, int], randn: Randn
) -> None:
    how: dict[str, Any] = {"strides": (3, 1), "padding": padding, "groups": 4, "residual": False}
    for lanes in (4, 8, 16):
        separate(randn(2, 4, 11, 9), randn(4, 1, *kernel), randn(3, 4, 1, 1), machine(lanes), **how)


@pytest.mark.parametrize("activation", [relax.op.sigmoid, relax.op.nn.silu, relax.op.nn.gelu, lambda v: v])
def test_whatever_is_between(activation: Callable[..., relax.Expr], randn: Randn) -> None:
    x, w, v = randn(1, 16, 32, 20), randn(16, 1, 3, 3), randn(8, 16, 1, 1)

    def chain(p: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        first = activation(relax.op.nn.conv2d(p, relax.const(w), padding=1, groups=16))
        return first, relax.op.nn.conv2d(first, relax.const(v))

    narrow = run(lambda p: chain(p)[0], {"x": x}, machine(16)).outputs[0]
    result = run(lambda p: chain(p)[1], {"x": x}, machine(16))
    assert separable.KIND in result.schedules
    close(result.outputs[0], conv2d(narrow, v))


def _twice(first: relax.Expr, v: relax.Expr) -> relax.Expr:
    return relax.op.add(relax.op.nn.conv2d(first, v), first)


OTHERS = {
    "another reader": (_twice, (16, 16, 1, 1)),
    "a window": (lambda first, v: relax.op.nn.conv2d(first, v, padding=1), (16, 16, 3, 3)),
    "a stride": (lambda first, v: relax.op.nn.conv2d(first, v, strides=2), (16, 16, 1, 1)),
    "padding": (lambda first, v: relax.op.nn.conv2d(first, v, padding=1), (16, 16, 1, 1)),
    "groups": (lambda first, v: relax.op.nn.conv2d(first, v, groups=2), (32, 8, 1, 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_pairs_are_two_kernels(name: str, randn: Randn) -> None:
    second, shape = OTHERS[name]
    x, w, v = randn(1, 16, 32, 32), randn(16, 1, 3, 3), randn(*shape)

    def build(p: relax.Expr) -> relax.Expr:
        first = relax.op.nn.relu(relax.op.nn.conv2d(p, relax.const(w), padding=1, groups=16))
        return second(first, relax.const(v))

    result = run(build, {"x": x}, machine(16))
    assert separable.KIND not in result.schedules
    assert "depthwise" in result.schedules


PAIR = Pair(batch=1, channels=144, height=56, width=56, out_channels=24, in_width=58, stride=1, window=3)


def test_one_kernel_pays_while_weights_are_few_and_rows_many() -> None:
    target = machine(16)
    assert PAIR.pays(target)
    assert not replace(PAIR, out_channels=56 * 56 + 1).pays(target)  # more weights than numbers between
    assert not replace(PAIR, height=7).pays(target)  # too few bands for cores
    assert replace(PAIR, height=7, batch=16).pays(target)
    wide = replace(PAIR, width=4096, in_width=4098)
    assert wide.pays(target) == (wide.band_bytes(1) <= 0.8 * target.core.l2_bytes)
    assert not replace(PAIR, width=1 << 20, in_width=1 << 20).pays(target)  # no row fits the cache


@pytest.mark.parametrize("height", [1, 2, 5, 13, 28, 37, 56, 112, 211])
def test_a_band_stays_in_the_cache_and_gives_all_cores_some(height: int) -> None:
    target = machine(16)
    pair = replace(PAIR, height=height)
    rows = pair.band(target)
    assert 1 <= rows <= height
    assert pair.band_bytes(rows) <= target.core.l2_bytes
    if height >= 28:
        assert shares.unevenness(-(-height // rows)) <= 1.5
