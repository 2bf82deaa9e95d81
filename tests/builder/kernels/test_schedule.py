"""Every function gets a schedule: without blocks, elements or axes, and of any type."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import relax

from builder.compiling.lower import lower
from builder.errors import BuildError
from builder.kernels import schedule
from builder.kernels.decisions import Schedules
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, machine, module_of, run


@pytest.fixture(params=[4, 16])
def target(request: pytest.FixtureRequest) -> DeviceTarget:
    return machine(request.param)


def test_a_function_without_blocks_stays_as_it_is(target: DeviceTarget, randn: Randn) -> None:
    x, updates = randn(10, 4), randn(3, 4)
    ids = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [9, 9, 8, 9]], "i8")
    result = run(relax.op.scatter_elements, {"x": x, "ids": ids, "u": updates}, target)
    want = x.copy()
    np.put_along_axis(want, ids, updates, 0)
    assert (result.outputs[0] == want).all()
    assert result.schedules == {"opaque"}


def test_scatter_of_rows_warns_of_no_pragma(
    target: DeviceTarget, randn: Randn, capfd: pytest.CaptureFixture[str]
) -> None:
    x, updates = randn(10, 4), randn(2, 4)
    ids = np.array([[7], [2]], "i8")
    result = run(relax.op.scatter_nd, {"x": x, "ids": ids, "u": updates}, target)
    want = x.copy()
    want[[7, 2]] = updates
    assert (result.outputs[0] == want).all()
    assert "pragma" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int32", "int64", "uint8"])
@pytest.mark.parametrize(
    ("shape", "lanes"),
    [*itertools.product([(3, 5), (1, 70, 33)], (4, 16)), ((), 4), ((1,), 16), ((0,), 4), ((2, 0, 3), 16)],
)
def test_any_type_and_shape_is_computed(dtype: str, shape: tuple[int, ...], lanes: int) -> None:
    target, x = machine(lanes), np.asarray(np.random.RandomState(1).rand(*shape) * 9).astype(dtype)
    result = run(lambda v: relax.op.maximum(relax.op.add(v, v), relax.const(3, dtype)), {"x": x}, target)
    assert result.outputs[0].shape == shape
    assert (result.outputs[0] == np.maximum(x + x, np.array(3, dtype))).all()


def test_truth_values_are_computed(target: DeviceTarget, randn: Randn) -> None:
    x, y = randn(3, 50), randn(3, 50)
    result = run(
        lambda a, b: relax.op.logical_not(relax.op.logical_and(relax.op.less(a, b), relax.op.less(b, a * a))),
        {"x": x, "y": y},
        target,
    )
    assert (result.outputs[0] == ~((x < y) & (y < x * x))).all()


@pytest.mark.parametrize("dtype", ["float16", "float64", "int64"])
def test_sum_of_everything_is_one_number(dtype: str, target: DeviceTarget) -> None:
    x = np.arange(7 * 45).reshape(7, 45).astype(dtype) % 5
    assert run(relax.op.sum, {"x": x}, target).outputs[0] == x.sum()


def test_sum_over_nothing_is_zero(target: DeviceTarget) -> None:
    result = run(lambda v: relax.op.sum(v, axis=1), {"x": np.zeros((3, 0), "f4")}, target)
    assert (result.outputs[0] == 0).all()
    assert result.outputs[0].shape == (3,)


@pytest.mark.slow
def test_operands_of_a_concatenation_are_computed_in_vectors(target: DeviceTarget, randn: Randn) -> None:
    x = randn(1, 2000, 2)
    result = run(lambda v: relax.op.concat([relax.op.exp(v), v], axis=2), {"x": x}, target)
    assert np.allclose(result.outputs[0], np.concatenate([np.exp(x), x], 2), rtol=1e-5)
    (kernel,) = result.lowered.kernels.functions.values()
    exp = kernel.script().split('T.sblock("exp")')[0].splitlines()
    assert any("T.vectorized" in line for line in exp)


def test_a_space_that_fails_is_told_or_an_error(
    target: DeviceTarget, randn: Randn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("a mistake in the space")

    mod = module_of(relax.op.matmul, {"a": randn(8, 16), "b": randn(16, 32)})
    monkeypatch.setattr(schedule, "SPACES", dict.fromkeys(schedule.SPACES, fail))
    told: list[str] = []
    lowered = lower(mod, target, Schedules(progress=told.append))
    assert any("slower than it could be" in line and "a mistake in the space" in line for line in told)
    (func,) = lowered.kernels.functions.values()
    assert str(func.attrs[schedule.SCHEDULE]) == "fallback"
    assert "a mistake in the space" in str(func.attrs[schedule.FAULT])
    with pytest.raises(BuildError, match="a mistake in the space"):
        lower(mod, target, Schedules(strict=True))
