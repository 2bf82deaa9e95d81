"""One-dimensional and transposed convolutions, against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, conv2d, run

pytestmark = pytest.mark.slow


def transposed(x: np.ndarray, w: np.ndarray, stride: int, padding: int, more: int) -> np.ndarray:
    """Return the transposed convolution in double precision, by its definition."""
    n, _, height, width = x.shape
    _, outputs, kh, kw = w.shape
    full = np.zeros((n, outputs, (height - 1) * stride + kh + more, (width - 1) * stride + kw + more))
    for y in range(height):
        for z in range(width):
            part = np.einsum("ni,iokl->nokl", x[:, :, y, z].astype("f8"), w.astype("f8"))
            full[:, :, y * stride : y * stride + kh, z * stride : z * stride + kw] += part
    end = -padding or None
    return full[:, :, padding:end, padding:end]


@pytest.mark.parametrize(
    ("size", "stride", "padding", "more"),
    [
        (4, 2, 1, 0),
        (3, 2, 1, 1),
        (2, 2, 0, 0),
        (3, 1, 1, 0),
        (2, 1, 2, 0),
        (5, 3, 0, 2),
        (3, 2, 0, 1),
        (1, 2, 0, 1),
    ],
)
def test_transposed_convolution(
    size: int, stride: int, padding: int, more: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(1, 16, 5, 6), randn(16, 8, size, size)
    build = lambda v: relax.op.nn.conv2d_transpose(  # noqa: E731
        v, relax.const(w), strides=stride, padding=padding, output_padding=more
    )
    result = run(build, {"x": x}, target)
    close(result.outputs[0], transposed(x, w, stride, padding, more))
    assert result.schedules & {"conv2d", "winograd"}


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups"), [(1, 1, 1, 1), (2, 0, 2, 1), (1, 2, 1, 4)]
)
def test_convolution_in_one_dimension(
    stride: int, padding: int, dilation: int, groups: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w = randn(2, 16, 20), randn(32, 16 // groups, 3)
    build = lambda v: relax.op.nn.conv1d(  # noqa: E731
        v, relax.const(w), strides=stride, padding=padding, dilation=dilation, groups=groups
    )
    result = run(build, {"x": x}, target)
    pads = (0, padding, 0, padding)
    want = conv2d(x[:, :, None], w[:, :, None], (1, stride), pads, (1, dilation), groups)[:, :, 0]
    close(result.outputs[0], want)
    assert "conv2d" in result.schedules


def test_bias_activation_and_residual_stay_with_a_convolution_in_one_dimension(
    target: DeviceTarget, randn: Randn
) -> None:
    x, w, b, residual = randn(1, 16, 20), randn(16, 16, 3), randn(1, 16, 1), randn(1, 16, 20)

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv1d(v, relax.const(w), padding=1)
        y = relax.op.nn.relu(relax.op.add(y, relax.const(b)))
        return relax.op.nn.conv1d(relax.op.add(y, r), relax.const(w), padding=1)

    result = run(build, {"x": x, "r": residual}, target)

    def conv(v: np.ndarray) -> np.ndarray:
        return conv2d(v[:, :, None], w[:, :, None], padding=(0, 1, 0, 1))[:, :, 0]

    close(result.outputs[0], conv(np.maximum(conv(x) + b, 0) + residual))
    convolutions = [g for g in result.lowered.kernels.functions if "conv2d" in g.name_hint]
    assert any("relu_add" in g.name_hint for g in convolutions)
