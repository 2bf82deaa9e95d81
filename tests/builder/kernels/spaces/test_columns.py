"""Softmax, its logarithm and reductions along axes before the last."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import columns
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, machine, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 5, 7), 1),
        ((3, 5, 7), 0),
        ((2, 21, 9, 16), 1),
        ((1, 4, 8400), -2),
        ((2, 3, 6, 49), 2),
        ((19, 3), 0),
    ],
)
def test_softmax_of_columns(shape: tuple[int, ...], axis: int, target: DeviceTarget, randn: Randn) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.softmax(v, axis=axis), {"x": x}, target)
    e = np.exp(x.astype("f8") - x.max(axis, keepdims=True))
    close(result.outputs[0], e / e.sum(axis, keepdims=True), 1e-6)
    assert result.schedules == {columns.KIND}


@pytest.mark.parametrize(
    ("shape", "axes"), [((3, 5, 17), [1]), ((1, 7, 6, 300), [1]), ((2, 3, 4, 9), [1, 2]), ((6, 500), [0])]
)
@pytest.mark.parametrize("name", ["mean", "sum", "max", "min"])
def test_reductions_of_columns(
    shape: tuple[int, ...], axes: list[int], name: str, target: DeviceTarget, randn: Randn
) -> None:
    x = randn(*shape)
    operator, definition = getattr(relax.op, name), getattr(np, name)
    result = run(lambda v: operator(v, axes, keepdims=True), {"x": x}, target)
    close(result.outputs[0], definition(x.astype("f8"), axis=tuple(axes), keepdims=True))
    assert result.schedules == {columns.KIND}
    got = run(lambda v: operator(relax.op.exp(v), axes), {"x": x}, target).outputs[0]
    close(got, definition(np.exp(x.astype("f8")), axis=tuple(axes)))


@pytest.mark.parametrize(("name", "infinity"), [("max", -np.inf), ("min", np.inf)])
def test_a_column_of_infinities(name: str, infinity: float, randn: Randn) -> None:
    x = randn(2, 5, 19)
    x[1, :, 3] = infinity
    got = run(lambda v: getattr(relax.op, name)(v, [1]), {"x": x}, machine(8)).outputs[0]
    assert (got == getattr(np, name)(x, axis=1)).all()


@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 7), 1), ((1, 11, 9, 16), 1), ((6, 500), 0)])
@pytest.mark.parametrize("name", ["argmax", "argmin"])
def test_the_first_of_equal_extrema_is_found(
    shape: tuple[int, ...], axis: int, name: str, target: DeviceTarget, randn: Randn
) -> None:
    x = np.round(randn(*shape))  # with many equal elements
    for keeps in (False, True):
        result = run(lambda v, k=keeps: getattr(relax.op, name)(v, axis, k), {"x": x}, target)
        assert (result.outputs[0] == getattr(np, name)(x, axis=axis, keepdims=keeps)).all()
        assert result.outputs[0].dtype == np.int64
        assert result.schedules == {columns.KIND}
    x[:] = np.nan
    got = run(lambda v: getattr(relax.op, name)(v, axis), {"x": x}, target).outputs[0]
    assert ((got >= 0) & (got < shape[axis])).all()


@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 7), 1), ((2, 21, 9, 16), 1), ((1, 4, 8400), -2)])
def test_the_logarithm_of_softmax(
    shape: tuple[int, ...], axis: int, target: DeviceTarget, randn: Randn
) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.log_softmax(v, axis=axis), {"x": x}, target)
    e = x.astype("f8") - x.max(axis, keepdims=True)
    close(result.outputs[0], e - np.log(np.exp(e).sum(axis, keepdims=True)), 1e-6)
    assert result.schedules == {columns.KIND}


def test_masked_scores_become_exactly_zero(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 5, 40)
    x[:, 3, ::2] = -np.inf
    x[0, 1, 1] = np.nan
    got = run(lambda v: relax.op.nn.softmax(v, axis=1), {"x": x}, target).outputs[0]
    assert (got[:, 3, ::2] == 0).all()
    assert np.isnan(got[0, :, 1]).all()
    assert np.isfinite(got[1]).all()


def test_softmax_is_fused_with_what_follows(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 5, 40)
    result = run(
        lambda v: relax.op.multiply(relax.op.nn.softmax(relax.op.nn.relu(v), axis=1), v), {"x": x}, target
    )
    e = np.exp(np.maximum(x, 0).astype("f8"))
    close(result.outputs[0], e / e.sum(1, keepdims=True) * x)
