"""Integers divided by integers of a request: no signal, and one result on every machine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx

from tests.builder.kernels.integer_quotients import EVERY_TYPE, operands, quotient
from tests.builder.kernels.machines import lower_expression, machine, run

OPERATORS: dict[str, Callable[..., relax.Expr]] = {
    "truncated": relax.op.divide,
    "floor": relax.op.floor_divide,
    "remainder": relax.op.mod,
    "floor remainder": relax.op.floor_mod,
}


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(("dtype", "lanes"), list(zip(EVERY_TYPE, (4, 8, 16, 4, 8, 16, 4, 8), strict=True)))
def test_every_pair_has_a_result(kind: str, dtype: str, lanes: int) -> None:
    a, b = operands(dtype)
    result = run(OPERATORS[kind], {"a": a, "b": b}, machine(lanes))
    np.testing.assert_array_equal(result.outputs[0], quotient(kind, a, b))


def test_one_divisor_for_a_row() -> None:
    a = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    b = np.array([[0], [-1], [5]], np.int32)
    result = run(relax.op.divide, {"a": a, "b": b}, machine(8))
    np.testing.assert_array_equal(
        result.outputs[0].ravel(), quotient("truncated", a.ravel(), np.repeat(b.ravel(), 4))
    )


def test_a_number_divided_by_itself() -> None:
    """TVM takes it for 1."""
    x = np.array([0, 5, -1, 0], np.int32)
    result = run(lambda a: relax.op.divide(a, a), {"a": x}, machine(4))
    assert result.outputs[0].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_the_least_integer_is_a_constant_divisor(kind: str, dtype: str) -> None:
    """Its magnitude has no place in its type."""
    limits = np.iinfo(dtype)
    a = np.array([0, 5, -7, limits.min, limits.min + 1, limits.max], dtype)
    b = np.full(a.shape, limits.min, dtype)
    for divisor in (b, np.array(limits.min, dtype)):
        result = run(lambda x, d=divisor: OPERATORS[kind](x, relax.const(d, dtype)), {"a": a}, machine(8))
        np.testing.assert_array_equal(result.outputs[0], quotient(kind, a, b))


@pytest.mark.parametrize("divisor", [np.array(7, np.int32), np.arange(1, 17, dtype=np.int32)])
@pytest.mark.parametrize("kind", OPERATORS)
def test_a_constant_divisor_is_not_tested(kind: str, divisor: np.ndarray) -> None:
    x = np.zeros(16, np.int32)
    lowered = lower_expression(lambda a: OPERATORS[kind](a, relax.const(divisor)), {"a": x}, machine(8))
    (kernel,) = lowered.kernels.functions.values()
    choices: list[tirx.Select] = []
    tvm_ffi.structural_walk(kernel.body, (tirx.Select, choices.append))
    assert not choices
