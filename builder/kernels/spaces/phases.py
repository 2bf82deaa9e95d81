"""The phases of a picture: a convolution of few channels at stride 2 as one at stride 1.

The windows of adjacent outputs begin two pixels apart. So the pixels of even and of odd places are four
pictures of half the height and width, the phases. Their windows begin one pixel apart: 7x7 at stride 2
becomes 4x4 at stride 1, of four times as many channels. Then Winograd's algorithm applies. The four phases of
a channel are a block, so that they are a vector on ARM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from tvm import s_tir as st
from tvm import te, tirx
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.spaces.geometry import Conv2d

BLOCK: Final = 4


def applies(op: Conv2d, lanes: int) -> bool:
    """Whether a convolution has stride 2, and its phases fill vectors of `lanes`."""
    return (op.strides, op.dilation, op.groups, lanes) == ((2, 2), (1, 1), 1, BLOCK)


def _outside(op: Conv2d) -> tuple[int, int]:
    """Return the taps, 0 or 1, that stand before the window along each axis: its padding becomes even."""
    return op.padding[0] % 2, op.padding[1] % 2


def at_stride_1(op: Conv2d) -> Conv2d:
    """Return the geometry of the same convolution on the phases of its input."""
    kernel = tuple((taps + before + 1) // 2 for taps, before in zip(op.kernel, _outside(op), strict=True))
    height, width = -(-op.in_height // 2), -(-op.in_width // 2)
    top, left = (-(-side // 2) for side in op.padding[:2])
    return replace(
        op,
        in_channels=BLOCK * op.in_channels,
        in_height=height,
        in_width=width,
        kernel=(kernel[0], kernel[1]),
        strides=(1, 1),
        padding=(
            top,
            left,
            op.out_height - 1 + kernel[0] - height - top,
            op.out_width - 1 + kernel[1] - width - left,
        ),
    )


def weights_at_stride_1(op: Conv2d, weight: np.ndarray) -> np.ndarray:
    """Return the weights `[OC, 4 * IC, KH', KW']` for the phases, of `[OC, IC, KH, KW]`."""
    kernel = at_stride_1(op).kernel
    outputs, inputs, height, width = weight.shape
    (top, left), full = _outside(op), np.zeros((outputs, inputs, 2 * kernel[0], 2 * kernel[1]), weight.dtype)
    full[:, :, top : top + height, left : left + width] = weight
    split = full.reshape(outputs, inputs, kernel[0], 2, kernel[1], 2).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(split.reshape(outputs, BLOCK * inputs, *kernel))


def divide(x: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return the phases, `[N, C, ceil(H/2), ceil(W/2), 4]`, of a picture, `[N, C, H, W, 1]`."""
    n, c, height, width, _ = (int(d) for d in x.shape)
    whole = height % 2 == 0 and width % 2 == 0

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        row, column = 2 * y + v // 2, 2 * z + v % 2
        value = x[i, o, row, column, 0]
        if whole:
            return value
        inside = tirx.all(row < height, column < width)
        return tirx.if_then_else(inside, value, tirx.const(0, x.dtype))

    phased = at_stride_1(op)
    shape = (n, c, phased.in_height, phased.in_width, BLOCK)
    return te.compute(shape, element, name="phases")


def order(sch: st.Schedule, block: SBlockRV) -> None:
    """Order the loops of `divide`: rows are divided among cores."""
    *rows, _, phase = sch.get_loops(block)
    sch.unroll(phase)
    sch.parallel(sch.fuse(*rows))
