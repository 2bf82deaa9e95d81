"""Depthwise convolution, against its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx

from builder.kernels.spaces import depthwise
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, conv2d, crossed, machine, narrow_and_wide, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "stride", "lanes"), crossed([(32, 14, 3), (24, 9, 5), (7, 6, 3), (1, 6, 3)], [1, 2])
)
def test_depthwise_agrees_with_its_definition(
    case: tuple[int, int, int], stride: int, lanes: int, randn: Randn
) -> None:
    (channels, size, kernel), target = case, machine(lanes)
    x, w = randn(1, channels, size, size), randn(channels, 1, kernel, kernel)
    how: dict[str, Any] = {"strides": (stride, stride), "padding": (kernel // 2,) * 4, "groups": channels}
    result = run(
        lambda v: relax.op.clip(relax.op.nn.conv2d(v, relax.const(w), **how), 0, 6), {"x": x}, target
    )
    close(result.outputs[0], np.clip(conv2d(x, w, **how), 0, 6))
    assert channels == 1 or depthwise.KIND in result.schedules


PADDINGS = [
    # Below and to the right, no window reads the padding; rows with gaps between them.
    ((9, 9), (1, 1), (2, 1), (0, 0, 1, 0)),
    ((7, 9), (1, 1), (1, 2), (0, 0, 0, 1)),
    ((8, 10), (2, 2), (3, 3), (0, 0, 1, 1)),
    ((8, 11), (3, 2), (2, 3), (1, 0, 2, 2)),
    ((10, 9), (3, 3), (2, 2), (1, 1, 1, 1)),
    ((9, 9), (1, 1), (2, 1), (0, 0, 0, 1)),
    ((40, 30), (2, 2), (3, 3), (1, 1, 1, 1)),
]


@pytest.mark.parametrize(("case", "lanes"), narrow_and_wide(PADDINGS))
def test_any_padding(case: tuple[tuple[int, ...], ...], lanes: int, randn: Randn) -> None:
    (size, kernel, strides, padding), target = case, machine(lanes)
    x, w = randn(2, 12, *size), randn(12, 1, *kernel)
    how: dict[str, Any] = {"strides": strides, "padding": padding, "groups": 12}
    result = run(lambda v: relax.op.nn.conv2d(v, relax.const(w), **how), {"x": x}, target)
    close(result.outputs[0], conv2d(x, w, **how))
    assert depthwise.KIND in result.schedules


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [(13, 13), (1, 101)])
def test_a_large_window_is_not_written_out(kernel: tuple[int, int], randn: Randn) -> None:
    x, w = randn(1, 16, 14, 104), randn(16, 1, *kernel)
    result = run(lambda v: relax.op.nn.conv2d(v, relax.const(w), groups=16), {"x": x}, machine(8))
    close(result.outputs[0], conv2d(x, w, groups=16))
    assert depthwise.KIND in result.schedules
    loops: list[tirx.For] = []
    for func in result.lowered.kernels.functions.values():
        tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    unrolled = [int(loop.extent) for loop in loops if loop.kind == tirx.ForKind.UNROLLED]
    assert max(unrolled, default=1) < max(kernel)


@pytest.mark.parametrize("kernel_w", [3, 7, 13, 31, 401])
def test_the_heuristic_keeps_several_columns_for_any_window(kernel_w: int, target: DeviceTarget) -> None:
    tiles = depthwise.space(depthwise.Pictures(56, 56, 4096), kernel_w, target).default
    assert 2 <= tiles.ow <= target.simd.registers


@pytest.mark.slow
@pytest.mark.parametrize("channels", [16, 13])
def test_computed_filters(channels: int, target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, channels, 9, 8), randn(channels, 1, 3, 4)
    result = run(
        lambda v, f: relax.op.nn.conv2d(v, relax.op.tanh(f), groups=channels), {"x": x, "w": w}, target
    )
    close(result.outputs[0], conv2d(x, np.tanh(w.astype("f8")), groups=channels))
    assert depthwise.KIND in result.schedules


@pytest.mark.slow
def test_several_filters_for_each_channel(target: DeviceTarget, randn: Randn) -> None:
    x, w = randn(1, 8, 6, 6), randn(16, 1, 3, 3)
    how: dict[str, Any] = {"padding": (1, 1, 1, 1), "groups": 8}
    result = run(lambda v: relax.op.nn.conv2d(v, relax.const(w), **how), {"x": x}, target)
    close(result.outputs[0], conv2d(x, w, **how))
