"""Padding after a product: elements outside the product's tile are written, too."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.builder.kernels.machines import Randn, close, conv2d, machine, run

op = relax.op


@pytest.mark.parametrize("widths", [(0, 1, 0, 0), (0, 0, 0, 2), (1, 0, 0, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("channels", [1, 17])
def test_padding_behind_a_convolution_gets_what_follows(
    widths: tuple[int, int, int, int], channels: int, randn: Randn
) -> None:
    """Padding only at the end leaves indices as they are, so that TVM takes it for element-wise."""
    x, w = randn(1, channels, 5, 6), randn(3, channels, 3, 3)

    def build(v: relax.Expr) -> relax.Expr:
        return op.sigmoid(op.nn.pad(op.nn.conv2d(v, relax.const(w)), (0, 0, 0, 0, *widths)))

    top, bottom, left, right = widths
    want = np.pad(conv2d(x, w), ((0, 0), (0, 0), (top, bottom), (left, right)))
    close(run(build, {"x": x}, machine(16)).outputs[0], 1 / (1 + np.exp(-want)))
