"""Softmax, its logarithm and reductions along axes before the last."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import relax

from benchmarks.interpreter import Interpreter
from builder.kernels.spaces import columns
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, in_turn, lower_expression, machine, run

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
def test_reductions_of_columns(
    shape: tuple[int, ...], axes: list[int], target: DeviceTarget, randn: Randn
) -> None:
    x, names = randn(*shape), ("mean", "sum", "max", "min")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.Tuple([getattr(relax.op, name)(v, axes, keepdims=True) for name in names])

    result = run(build, {"x": x}, target)
    for name, got in zip(names, result.outputs, strict=True):
        close(got, getattr(np, name)(x.astype("f8"), axis=tuple(axes), keepdims=True))
    assert result.schedules == {columns.KIND}


@pytest.mark.parametrize(("name", "lanes"), in_turn(["mean", "sum", "max", "min"]))
def test_reductions_of_computed_columns(name: str, lanes: int, randn: Randn) -> None:
    for shape, axes in (((3, 5, 17), [1]), ((2, 3, 4, 9), [1, 2])):
        x = randn(*shape)
        build = lambda v, a=axes: getattr(relax.op, name)(relax.op.exp(v), a)  # noqa: E731
        got = run(build, {"x": x}, machine(lanes)).outputs[0]
        close(got, getattr(np, name)(np.exp(x.astype("f8")), axis=tuple(axes)))


@pytest.mark.parametrize(("name", "infinity"), [("max", -np.inf), ("min", np.inf)])
def test_a_column_of_infinities(name: str, infinity: float, randn: Randn) -> None:
    x = randn(2, 5, 19)
    x[1, :, 3] = infinity
    got = run(lambda v: getattr(relax.op, name)(v, [1]), {"x": x}, machine(8)).outputs[0]
    assert (got == getattr(np, name)(x, axis=1)).all()


@pytest.mark.parametrize(("shape", "axis"), [((3, 5, 7), 1), ((1, 11, 9, 16), 1), ((6, 500), 0)])
def test_the_first_of_equal_extrema_is_found(
    shape: tuple[int, ...], axis: int, target: DeviceTarget, randn: Randn
) -> None:
    x = np.round(randn(*shape))  # with many equal elements
    cases = list(itertools.product(("argmax", "argmin"), (False, True)))
    build = lambda v: relax.Tuple([getattr(relax.op, name)(v, axis, keeps) for name, keeps in cases])  # noqa: E731
    lowered = lower_expression(build, {"x": x}, target)
    assert {str(f.attrs["edge.schedule"]) for f in lowered.kernels.functions.values()} == {columns.KIND}
    interpreter = Interpreter(lowered, target.tvm_target)
    for (name, keeps), got in zip(cases, interpreter.run({"x": x}), strict=True):
        assert (got == getattr(np, name)(x, axis=axis, keepdims=keeps)).all()
        assert got.dtype == np.int64
    x[:] = np.nan
    for got in interpreter.run({"x": x}):
        assert ((got >= 0) & (got < shape[axis])).all()


@pytest.mark.parametrize(
    ("case", "lanes"), in_turn([((3, 5, 7), 1), ((1, 4, 8400), -2), ((2, 21, 9, 16), 1)])
)
def test_the_logarithm_of_softmax(case: tuple[tuple[int, ...], int], lanes: int, randn: Randn) -> None:
    shape, axis = case
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.log_softmax(v, axis=axis), {"x": x}, machine(lanes))
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
