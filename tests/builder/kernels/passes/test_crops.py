"""Slices of a convolution's rows and columns."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.builder.kernels.machines import Randn, Result, close, conv2d, machine, run

# Padding (top, left, bottom, right), stride, dilation, groups, and what is kept of rows and columns.
Case = tuple[tuple[int, int, int, int], int, int, int, slice, slice]
CUT: list[Case] = [
    ((0, 4, 0, 4), 1, 2, 1, slice(0, None), slice(0, -4)),  # causal
    ((2, 2, 2, 2), 1, 2, 1, slice(1, -2), slice(2, -1)),
    ((3, 4, 2, 5), 2, 1, 1, slice(1, 7), slice(2, 8)),
    ((1, 1, 1, 1), 1, 1, 8, slice(0, None), slice(1, None)),  # depthwise
    ((1, 1, 2, 1), 2, 1, 2, slice(0, -1), slice(0, None)),
    ((1, 1, 1, 1), 2, 1, 1, slice(0, 6), slice(0, 5)),  # all of it
]
# More is cut than the padding has on that side.
KEPT: list[Case] = [
    ((1, 1, 1, 1), 1, 1, 1, slice(2, None), slice(0, None)),
    ((1, 1, 1, 1), 1, 1, 1, slice(0, None), slice(0, -2)),
    ((0, 0, 0, 0), 1, 1, 1, slice(0, None), slice(0, -1)),
]


def is_sliced(result: Result) -> bool:
    return "slice" in " ".join(g.name_hint for g in result.lowered.kernels.functions)


def run_case(case: Case, randn: Randn) -> Result:
    padding, stride, dilation, groups, rows, columns = case
    x, w, bias = randn(2, 8, 12, 10), randn(8, 8 // groups, 3, 3), randn(1, 8, 1, 1)
    how = {"strides": (stride, stride), "padding": padding, "dilation": (dilation, dilation)}
    whole = conv2d(x, w, (stride, stride), padding, dilation=(dilation, dilation), groups=groups) + bias
    spans = [cut.indices(extent) for cut, extent in zip((rows, columns), whole.shape[2:], strict=True)]

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), **how, groups=groups)
        y = relax.op.nn.leakyrelu(relax.op.add(y, relax.const(bias)), 0.5)
        begins, ends = ([span[side] for span in spans] for side in (0, 1))
        return relax.op.nn.relu(relax.op.strided_slice(y, [2, 3], begins, ends))

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], np.maximum(whole, 0)[:, :, rows, columns])
    return result


@pytest.mark.parametrize("case", CUT)
def test_what_is_cut_off_is_not_computed(case: Case, randn: Randn) -> None:
    assert not is_sliced(run_case(case, randn))


@pytest.mark.parametrize("case", KEPT)
def test_a_slice_that_is_wider_than_the_padding_stays(case: Case, randn: Randn) -> None:
    assert is_sliced(run_case(case, randn))


def test_a_slice_of_what_others_read_stays(randn: Randn) -> None:
    x, w = randn(1, 8, 9, 9), randn(8, 8, 3, 3)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1))
        part = relax.op.strided_slice(y, [2], [0], [8])
        return relax.op.add(relax.op.sum(y, [2, 3], keepdims=True), part)

    result = run(build, {"x": x}, machine(8))
    whole = conv2d(x, w, padding=(1, 1, 1, 1))
    close(result.outputs[0], whole.sum((2, 3), keepdims=True) + whole[:, :, :8])
    assert is_sliced(result)


def test_every_second_column_is_sliced(randn: Randn) -> None:
    x, w = randn(1, 8, 9, 9), randn(8, 8, 3, 3)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1))
        return relax.op.strided_slice(y, [3], [0], [9], [2])

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], conv2d(x, w, padding=(1, 1, 1, 1))[:, :, :, ::2])


def test_numbers_that_differ_along_the_cut_stay_whole(randn: Randn) -> None:
    x, w, numbers = randn(1, 8, 9, 9), randn(8, 8, 3, 3), randn(1, 1, 1, 9)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(w), padding=(1, 1))
        y = relax.op.multiply(y, relax.const(numbers))
        return relax.op.strided_slice(y, [3], [1], [9])

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], (conv2d(x, w, padding=(1, 1, 1, 1)) * numbers)[:, :, :, 1:])
