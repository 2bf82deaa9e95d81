"""Convolutions of the same values that are added."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax
from tvm.ir import Call

from tests.builder.kernels.machines import Randn, Result, close, conv2d, machine, run

Windows = list[tuple[tuple[int, int], tuple[int, int, int, int]]]


def products(result: Result) -> int:
    """Return the number of convolutions that are computed."""
    calls = [binding.value for block in result.lowered.main.body.blocks for binding in block.bindings]
    names = [str(call.args[0]) for call in calls if isinstance(call, Call) and len(call.args) > 1]
    kinds = ("conv2d", "depthwise", "winograd")
    return sum(any(kind in name for kind in kinds) and "weights" not in name for name in names)


# Windows with the rows above, columns to the left, rows below and columns to the right.
BRANCHES: list[tuple[Windows, int, int]] = [
    ([((3, 3), (1, 1, 1, 1)), ((1, 1), (0, 0, 0, 0))], 1, 1),
    ([((1, 1), (0, 0, 0, 0)), ((3, 3), (1, 1, 1, 1))], 2, 1),
    ([((3, 3), (1, 1, 1, 1)), ((3, 3), (1, 1, 1, 1)), ((1, 1), (0, 0, 0, 0))], 1, 6),
    ([((3, 3), (1, 1, 1, 1)), ((1, 3), (0, 1, 0, 1)), ((3, 1), (1, 0, 1, 0))], 2, 2),
    ([((3, 5), (1, 2, 1, 2)), ((2, 3), (0, 2, 1, 0)), ((2, 3), (1, 0, 0, 2))], 1, 1),
]


@pytest.mark.parametrize(("windows", "stride", "groups"), BRANCHES)
def test_branches_are_one_convolution(windows: Windows, stride: int, groups: int, randn: Randn) -> None:
    x = randn(2, 6, 9, 8)
    weights = [randn(6, 6 // groups, *size) for size, _ in windows]

    def build(v: relax.Expr) -> relax.Expr:
        total = None
        for weight, (_, pads) in zip(weights, windows, strict=True):
            y = relax.op.nn.conv2d(v, relax.const(weight), (stride, stride), pads, groups=groups)
            y = relax.op.add(y, relax.const(np.full((1, 6, 1, 1), 0.5, "f4")))
            total = y if total is None else relax.op.add(total, y)
        return total

    result = run(build, {"x": x}, machine(8))
    parts = [
        conv2d(x, weight, (stride, stride), pads, groups=groups) + 0.5
        for weight, (_, pads) in zip(weights, windows, strict=True)
    ]
    close(result.outputs[0], np.sum(parts, axis=0))
    assert products(result) == 1


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_a_scaled_input_joins_its_convolution(groups: int, randn: Randn) -> None:
    x, weight, factor, shift = (
        randn(1, 6, 7, 8),
        randn(6, 6 // groups, 3, 3),
        randn(1, 6, 1, 1),
        randn(1, 6, 1, 1),
    )

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(weight), (1, 1), (1, 1), groups=groups)
        scaled = relax.op.add(relax.op.multiply(v, relax.const(factor)), relax.const(shift))
        return relax.op.add(scaled, y)

    result = run(build, {"x": x}, machine(16))
    close(result.outputs[0], conv2d(x, weight, padding=(1, 1, 1, 1), groups=groups) + x * factor + shift)
    kinds = result.schedules - {"fallback", "unpack"}
    assert len(kinds) == 1
    assert "multiply" not in " ".join(g.name_hint for g in result.lowered.kernels.functions)


# A window with gaps; windows of other values; more work than both; a window that does not read its pixel.
def _dilated(v: relax.Expr, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    one = relax.op.nn.conv2d(v, a, padding=(2, 2), dilation=(2, 2))
    return relax.op.add(one, relax.op.nn.conv2d(v, b, padding=(1, 1)))


def _of_others(v: relax.Expr, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    one = relax.op.nn.conv2d(relax.op.nn.relu(v), a, padding=(1, 1))
    return relax.op.add(one, relax.op.nn.conv2d(v, b, padding=(1, 1)))


def _read_again(v: relax.Expr, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    one = relax.op.nn.conv2d(v, a, padding=(1, 1))
    total = relax.op.add(one, relax.op.nn.conv2d(v, b, padding=(1, 1)))
    return relax.op.multiply(total, one)


def _apart(v: relax.Expr, a: relax.Expr, b: relax.Expr) -> relax.Expr:
    one = relax.op.nn.conv2d(v, a, padding=(8, 1, 1, 1))
    return relax.op.add(one, relax.op.nn.conv2d(v, b, padding=(1, 1, 8, 1)))


@pytest.mark.parametrize("form", [_dilated, _of_others, _read_again, _apart])
def test_other_sums_stay_two_convolutions(form: Callable[..., relax.Expr], randn: Randn) -> None:
    x, a, b = randn(1, 6, 9, 8), randn(6, 6, 3, 3), randn(6, 6, 3, 3)
    build = lambda v: form(v, relax.const(a), relax.const(b))  # noqa: E731
    result = run(build, {"x": x}, machine(8))
    one, other = {
        _dilated: (conv2d(x, a, padding=(2, 2, 2, 2), dilation=(2, 2)), conv2d(x, b, padding=(1, 1, 1, 1))),
        _of_others: (conv2d(np.maximum(x, 0), a, padding=(1, 1, 1, 1)), conv2d(x, b, padding=(1, 1, 1, 1))),
        _read_again: (conv2d(x, a, padding=(1, 1, 1, 1)), conv2d(x, b, padding=(1, 1, 1, 1))),
        _apart: (conv2d(x, a, padding=(8, 1, 1, 1)), conv2d(x, b, padding=(1, 1, 8, 1))),
    }[form]
    close(result.outputs[0], (one + other) * (one if form is _read_again else 1))
    assert products(result) == 2


def test_a_window_beside_its_pixel_takes_no_scaled_input(randn: Randn) -> None:
    x, weight, factor = randn(1, 4, 6, 6), randn(4, 4, 1, 1), randn(1, 4, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(v, relax.const(weight), (1, 1), (1, 0, -1, 0))
        return relax.op.add(y, relax.op.multiply(v, relax.const(factor)))

    moved = np.concatenate([np.zeros((1, 4, 1, 6)), conv2d(x, weight)[:, :, :-1]], 2)
    close(run(build, {"x": x}, machine(4)).outputs[0], moved + x * factor)
