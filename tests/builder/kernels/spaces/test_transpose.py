"""Transposes."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx

from builder.kernels.spaces import transpose
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, conv2d, in_turn, machine, run

MOVES: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = [
    ((2, 48, 3, 32), (0, 2, 3, 1)),
    ((5, 7, 9), (2, 1, 0)),
    ((33, 18), None),
    ((1, 3, 20, 20), (0, 2, 3, 1)),
    ((2, 6, 4, 5), (3, 0, 1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("move", "lanes"), in_turn(MOVES))
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_last_axis_moves(
    move: tuple[tuple[int, ...], tuple[int, ...] | None], lanes: int, dtype: str, randn: Randn
) -> None:
    shape, axes = move
    x = (randn(*shape) * 10).astype(dtype)
    result = run(lambda v: relax.op.permute_dims(v, axes), {"x": x}, machine(lanes))
    assert np.array_equal(result.outputs[0], x.transpose(axes))
    assert result.schedules == {transpose.KIND}


def test_elementwise_operators_join_a_transpose(target: DeviceTarget, randn: Randn) -> None:
    x, y = randn(4, 18, 33), randn(33, 4, 18)
    build = lambda v, w: relax.op.add(relax.op.permute_dims(relax.op.abs(v), (2, 0, 1)), w)  # noqa: E731
    result = run(build, {"x": x, "y": y}, target)
    assert np.array_equal(result.outputs[0], np.abs(x).transpose(2, 0, 1) + y)
    assert result.schedules == {transpose.KIND}
    assert len(result.lowered.kernels.functions) == 1


def test_parts_of_a_transpose(target: DeviceTarget, randn: Randn) -> None:
    x = randn(1, 40, 3, 4, 12)  # queries, keys and values of channels

    def build(v: relax.Expr) -> relax.Expr:
        parts = relax.op.split(relax.op.permute_dims(v, (2, 0, 3, 4, 1)), 3, 0)
        return relax.Tuple([relax.op.negative(parts[i]) for i in range(3)])

    result = run(build, {"x": x}, target)
    for got, part in zip(result.outputs, x.transpose(2, 0, 3, 4, 1), strict=True):
        assert np.array_equal(got[0], -part)
    assert transpose.KIND in result.schedules  # one kernel for all parts


def test_a_formula_of_some_columns(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 12, 41)  # the sizes of a detector's boxes are exponentials

    def build(v: relax.Expr) -> relax.Expr:
        rows = relax.op.permute_dims(v, (0, 2, 1))
        parts = relax.op.split(rows, [2, 4], 2)
        return relax.op.concat([parts[0], relax.op.exp(parts[1]), parts[2]], 2)

    result = run(build, {"x": x}, target)
    want = x.transpose(0, 2, 1).copy()
    want[..., 2:4] = np.exp(want[..., 2:4])
    close(result.outputs[0], want)
    assert result.schedules == {transpose.KIND}


def test_channels_that_come_last_are_packed_by_vectors(randn: Randn) -> None:
    x, weight = randn(1, 6, 5, 32), randn(32, 32, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(relax.op.permute_dims(v, (0, 3, 1, 2)), relax.const(weight))

    result = run(build, {"x": x}, machine(16))
    close(result.outputs[0], conv2d(x.transpose(0, 3, 1, 2), weight))
    packing = next(f for g, f in result.lowered.kernels.functions.items() if "pack" in g.name_hint.split("_"))
    vectors: list[int] = []

    def loop(stmt: tirx.For) -> None:
        if stmt.kind == tirx.ForKind.VECTORIZED:
            vectors.append(int(stmt.extent))

    tvm_ffi.structural_walk(packing.body, (tirx.For, loop))
    assert vectors == [16]


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3)])
def test_last_axis_stays(axes: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 3, 5, 16)
    result = run(lambda v: relax.op.permute_dims(v, axes), {"x": x}, target)
    assert np.array_equal(result.outputs[0], x.transpose(axes))


@pytest.mark.parametrize("axes", [(1, 0), (0, 2, 1)])
def test_axis_of_one_moves(axes: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    x = randn(*(1, 40, 40)[-len(axes) :])[..., :1]
    result = run(lambda v: relax.op.permute_dims(v, axes), {"x": x}, target)
    assert np.array_equal(result.outputs[0], x.transpose(axes))
