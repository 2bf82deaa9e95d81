"""Winograd's algorithm on windows with gaps."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import gaps
from builder.kernels.spaces.geometry import Conv2d
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import Randn, close, conv2d, element_machine, machine, run


def dilated(channels: int, size: int, dilation: int, outputs: int | None = None) -> Conv2d:
    """Return a 3x3 convolution of a square image whose result has the same size."""
    around = (dilation,) * 4
    return Conv2d(
        1, channels, size, size, outputs or channels, (3, 3), (1, 1), around, (dilation, dilation), 1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "dilation", "padding"),
    [((20, 20), (2, 2), (2, 2, 2, 2)), ((25, 22), (3, 2), (3, 2, 3, 2)), ((24, 26), (2, 2), (1, 3, 0, 4))],
)
def test_windows_with_gaps_by_winograd(
    size: tuple[int, int],
    dilation: tuple[int, int],
    padding: tuple[int, int, int, int],
    target: DeviceTarget,
    randn: Randn,
) -> None:
    x, w, bias = randn(2, 40, *size), randn(48, 40, 3, 3), randn(1, 48, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=padding, dilation=dilation)
        return relax.op.nn.relu(relax.op.add(y, relax.const(bias)))

    result = run(build, {"x": x}, target)
    close(result.outputs[0], np.maximum(conv2d(x, w, (1, 1), padding, dilation) + bias, 0))
    assert "winograd" in result.schedules


def test_larger_windows_with_gaps_on_arm(randn: Randn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "output_tile", lambda *_: (3, 3))
    x, w, padding = randn(1, 8, 19, 22), randn(12, 8, 5, 5), (4, 3, 4, 5)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(v, relax.const(w), padding=padding, dilation=(2, 2))

    result = run(build, {"x": x}, element_machine())
    close(result.outputs[0], conv2d(x, w, (1, 1), padding, (2, 2)))
    assert "winograd" in result.schedules


def test_costs_are_those_of_the_window() -> None:
    """A 5x5 window has 25 taps, of which Winograd's algorithm saves more than of 9."""
    target = resolve("rpi5")
    five = Conv2d(1, 128, 28, 28, 128, (5, 5), (1, 1), (4, 4, 4, 4), (2, 2), 1)
    assert gaps.output_tile(five, 4, target) is not None
    three = Conv2d(1, 64, 14, 14, 64, (3, 3), (1, 1), (4, 4, 4, 4), (4, 4), 1)
    assert gaps.output_tile(three, 4, target) is None  # what is between the stages goes through memory
    small = Conv2d(1, 64, 9, 9, 64, (5, 5), (1, 1), (8, 8, 8, 8), (4, 4), 1)
    assert gaps.output_tile(small, 4, target) is None


def test_a_large_image_is_divided() -> None:
    target = machine(16)
    for channels, size, dilation in ((64, 40, 2), (128, 33, 2), (256, 33, 2), (64, 64, 4)):
        assert gaps.output_tile(dilated(channels, size, dilation), 16, target) is not None


def test_a_window_that_reads_much_padding_is_computed_directly() -> None:
    target = machine(16)
    assert gaps.output_tile(dilated(960, 16, 12, 256), 16, target) is None
    assert gaps.output_tile(dilated(64, 8, 4), 16, target) is None


def test_windows_without_gaps_and_steps_are_not_divided() -> None:
    target = machine(16)
    assert gaps.output_tile(dilated(64, 40, 1), 16, target) is None
    steps = Conv2d(1, 64, 40, 40, 64, (3, 3), (2, 2), (2, 2, 2, 2), (2, 2), 1)
    assert gaps.output_tile(steps, 16, target) is None
