"""Operators that no layout pass replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, lower_expression, machine, run


@pytest.mark.parametrize(("axis", "exclusive"), [(1, False), (0, True), (-1, True)])
def test_cumulative_sums(axis: int, exclusive: bool, target: DeviceTarget, randn: Randn) -> None:
    x = randn(3, 40)
    result = run(lambda v: relax.op.cumsum(v, axis, exclusive=exclusive), {"x": x}, target)
    want = np.cumsum(x.astype("f8"), axis)
    close(result.outputs[0], want - x if exclusive else want)


def test_an_index_out_of_range_takes_the_nearest_element(target: DeviceTarget, randn: Randn) -> None:
    x, at = randn(4, 3), np.array([0, 3, 7, -9], "i8")
    result = run(lambda v, i: relax.op.take(v, i, axis=0), {"x": x, "at": at}, target)
    assert np.array_equal(result.outputs[0], x[[0, 3, 3, 0]])


@pytest.mark.parametrize("exponent", [-2, -1, 0.5, 1, 2, 3, 4, 5, 2.2, -0.5])
def test_powers(exponent: float, randn: Randn) -> None:
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-20, -1e20, 3e38, -1.0]
    x = np.concatenate([np.array(special, "f4"), randn(191) * 3]).astype("f4").reshape(10, 20)
    result = run(lambda v: relax.op.power(v, relax.const(np.float32(exponent))), {"x": x}, machine(8))
    with np.errstate(all="ignore"):
        want = np.power(x.astype("f8"), exponent).astype("f4")
    if exponent == 0.5:  # NumPy computes a square root
        want = np.where(x == -np.inf, np.float32(np.inf), want + 0)
    want[np.abs(want) < np.finfo("f4").tiny] = 0  # no denormal numbers
    got = result.outputs[0]
    got[np.abs(got) < np.finfo("f4").tiny] = 0
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.array_equal(np.signbit(got[want == 0]), np.signbit(want[want == 0])) or exponent == -2


def test_common_powers_are_no_calls(randn: Randn) -> None:
    for exponent in (0.5, 2, 3):
        lowered = lower_expression(
            lambda v: relax.op.power(v, relax.const(np.float32(exponent))),  # noqa: B023 - called at once
            {"x": randn(4, 40)},
            machine(8),
        )
        assembly = build_kernels(lowered.kernels, machine(8).tvm_target).inspect_source("asm")
        assert "powf" not in assembly


def test_kernels_that_differ_by_the_scale_of_their_weights_are_one(target: DeviceTarget) -> None:
    w = relax.const(np.ones((16, 16), "i1"))

    def layer(v: relax.Expr, scale: relax.Expr, weight_scale: float) -> relax.Expr:
        sums = relax.op.astype(relax.op.matmul(v, w, out_dtype="int32"), "float32")
        return relax.op.multiply(sums, relax.op.multiply(scale, relax.const(np.float32(weight_scale))))

    x, scale = np.full((4, 16), 3, "u1"), np.asarray(0.5, "f4")
    build = lambda v, s: relax.Tuple([layer(v, s, 0.25), layer(v, s, 0.125)])  # noqa: E731
    result = run(build, {"x": x, "scale": scale}, target)
    for output, factor in zip(result.outputs, (0.125, 0.0625), strict=True):
        assert np.array_equal(output, np.full((4, 16), 48 * factor, "f4"))
    names = [var.name_hint for var in result.lowered.kernels.functions]
    assert sum("matmul" in name for name in names) == 1, names


@pytest.mark.parametrize("place", [relax.op.argmax, relax.op.argmin])
def test_the_extremum_of_equal_infinities_is_the_first(place: Any, target: DeviceTarget) -> None:
    x = np.array([[-np.inf] * 3, [np.inf] * 3, [1, 3, 2]], "f4")
    result = run(lambda v: place(v, axis=1), {"x": x}, target)
    chosen = 1 if place is relax.op.argmax else 0
    assert result.outputs[0].tolist() == [0, 0, chosen]
