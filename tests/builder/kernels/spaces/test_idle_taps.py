"""Taps of dilated windows that read only padding."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx

from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, Result, close, conv2d, in_turn, machine, run

Pair = tuple[int, int]


def convolution(
    x: np.ndarray, w: np.ndarray, how: dict[str, tuple[int, ...]], target: DeviceTarget, groups: int = 1
) -> Result:
    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), **how, groups=groups)
        return relax.op.nn.relu(relax.op.add(y, relax.const(np.full((1, len(w), 1, 1), 0.5, "f4"))))

    return run(build, {"x": x}, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "lanes"),
    in_turn(
        [
            ((16, 16), (3, 3), (12, 12), (12, 12, 12, 12), (1, 1)),
            ((13, 11), (3, 3), (5, 7), (5, 7, 5, 7), (1, 1)),
            ((9, 37), (3, 5), (2, 8), (1, 13, 4, 16), (2, 1)),  # more before than after
            ((1, 41), (1, 2), (1, 32), (0, 32, 0, 0), (1, 1)),  # a causal signal
            ((20, 5), (3, 1), (6, 1), (6, 0, 6, 0), (1, 1)),  # one column
            ((7, 30), (3, 3), (3, 9), (3, 9, 3, 9), (2, 3)),
            ((7, 6), (5, 5), (1, 1), (2, 2, 2, 2), (1, 1)),  # without gaps
        ]
    ),
)
def test_windows_with_gaps(
    case: tuple[Pair, Pair, Pair, tuple[int, ...], Pair], lanes: int, randn: Randn
) -> None:
    size, kernel, dilation, padding, strides = case
    x, w = randn(2, 24, *size), randn(40, 24, *kernel)
    how: dict[str, tuple[int, ...]] = {"strides": strides, "padding": padding, "dilation": dilation}
    result = convolution(x, w, how, machine(lanes))
    close(result.outputs[0], np.maximum(conv2d(x, w, strides, padding, dilation) + 0.5, 0))
    assert "conv2d" in result.schedules


def test_groups_of_windows_with_gaps(randn: Randn) -> None:
    x, w, padding = randn(1, 32, 10, 12), randn(32, 16, 3, 3), (8, 8, 8, 8)
    result = convolution(x, w, {"padding": padding, "dilation": (8, 8)}, machine(8), groups=2)
    close(result.outputs[0], np.maximum(conv2d(x, w, (1, 1), padding, (8, 8), 2) + 0.5, 0))


@pytest.mark.parametrize("axis", [2, 3])
def test_taps_on_padding_are_not_multiplied(axis: int, randn: Randn) -> None:
    x, w = randn(1, 16, 24, 24), randn(16, 16, 3, 3)
    w[(slice(None),) * axis + (0,)] = np.inf  # times zero, this is no number
    how = {"padding": (12, 12, 12, 12), "dilation": (12, 12)}
    y = np.moveaxis(convolution(x, w, how, machine(16)).outputs[0], axis, 0)
    assert np.isfinite(y[:8]).all()
    assert not np.isfinite(y[12:]).any()


def test_rows_of_a_window_without_gaps_on_padding_are_not_multiplied(randn: Randn) -> None:
    x, w = randn(1, 16, 8, 8), randn(16, 16, 5, 5)
    w[:, :, 0] = np.inf
    y = convolution(x, w, {"padding": (2, 2, 2, 2)}, machine(16)).outputs[0]
    assert np.isfinite(y[:, :, :2]).all()
    assert not np.isfinite(y[:, :, 2:]).any()


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "padding", "share"),
    [(3, 1, 1, 1, 2 / 24), (3, 1, 6, 6, 12 / 24), (3, 2, 1, 1, 1 / 12), (1, 1, 1, 0, 0), (3, 1, 1, 0, 0)],
)
def test_share_of_taps_on_padding(
    kernel: int, stride: int, dilation: int, padding: int, share: float
) -> None:
    twice = lambda n: (n, n)  # noqa: E731
    op = Conv2d(1, 4, 8, 8, 4, twice(kernel), twice(stride), (padding,) * 4, twice(dilation), 1)
    assert op.idle_share(0) == op.idle_share(1) == pytest.approx(share)


def test_padding_that_is_not_read_leaves_room_for_rows() -> None:
    data = tirx.decl_buffer((1, 4, 40, 40, 16), "float32")
    assert Rows.of(16, data).bytes_each == 4 * 40 * 40 * 16 * 4 // 16
    assert Rows.of(16, data, (16, 16)).bytes_each == 4 * 16 * 16 * 16 * 4 // 16
