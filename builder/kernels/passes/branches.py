"""Adds convolutions of the same values into one.

Networks that are trained with parallel branches (RepVGG, MobileOne, ACNet) and exported before the branches
are merged have, for each layer, convolutions of several windows and a batch norm of the input. Their sum is
one convolution, with the work of the largest window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import constant_of, shape_of


@dataclass(frozen=True, slots=True)
class Branch:
    """A convolution without gaps in its window.

    `weight`: the weights, `[O, I, H, W]`.
    `begins`: rows above and columns to the left of the image at which the first window begins.
    """

    weight: np.ndarray
    begins: tuple[int, int]

    @classmethod
    def of(cls, call: Call) -> Branch | None:
        """Return a convolution as a branch, None if its window has gaps or its weights are computed."""
        weight, dilations = constant_of(call.args[1]), [int(d) for d in call.attrs.dilation]
        if weight is None or any(d > 1 for d, k in zip(dilations, weight.shape[2:], strict=True) if k > 1):
            return None
        top, left, _, _ = (int(p) for p in call.attrs.padding)
        return cls(weight, (top, left))


def together(one: Call, other: Call, result: tuple[int, ...]) -> Call | None:
    """Return the sum of two convolutions as one; None if it is not one, or would have more work than both.

    `result`: the shape of both results.
    """
    first, second = Branch.of(one), Branch.of(other)
    if first is None or second is None or not one.args[0].same_as(other.args[0]):
        return None
    strides = [int(s) for s in one.attrs.strides]
    if strides != [int(s) for s in other.attrs.strides] or one.attrs.groups != other.attrs.groups:
        return None
    branches = (first, second)
    begins = [max(branch.begins[axis] for branch in branches) for axis in range(2)]
    window = [
        max(begins[axis] - branch.begins[axis] + branch.weight.shape[2 + axis] for branch in branches)
        for axis in range(2)
    ]
    if math.prod(window) > sum(math.prod(branch.weight.shape[2:]) for branch in branches):
        return None
    weight = np.zeros((*first.weight.shape[:2], *window), first.weight.dtype)
    for branch in branches:
        rows, columns = (begins[axis] - branch.begins[axis] for axis in range(2))
        height, width = branch.weight.shape[2:]
        weight[:, :, rows : rows + height, columns : columns + width] += branch.weight
    image = shape_of(one.args[0])[2:]
    ends = [
        stride * (out - 1) + size - before - extent
        for stride, out, size, before, extent in zip(strides, result[2:], window, begins, image, strict=True)
    ]
    if min(ends) < 0:
        return None
    return relax.op.nn.conv2d(
        one.args[0], relax.const(weight), strides, [*begins, *ends], groups=int(one.attrs.groups)
    )


def with_scaled(conv: Call, factor: np.ndarray, result: tuple[int, ...]) -> Call | None:
    """Return the sum of a convolution and of its input, times a factor for each channel, as one convolution.

    None if its `result` has another shape than its input, or no element of its window reads the pixel that it
    computes.
    """
    branch, shape = Branch.of(conv), shape_of(conv.args[0])
    if branch is None or result != shape or any(int(s) != 1 for s in conv.attrs.strides):
        return None
    rows, columns = branch.begins
    if rows >= branch.weight.shape[2] or columns >= branch.weight.shape[3]:
        return None
    weight = branch.weight.copy()
    channels = np.arange(shape[1])
    weight[channels, channels % weight.shape[1], rows, columns] += factor
    return Call(conv.op, [conv.args[0], relax.const(weight)], conv.attrs)
