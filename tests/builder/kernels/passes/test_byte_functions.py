"""Functions of one tensor of bytes, as 256 numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.kernels.passes.byte_functions import ByteFunction
from builder.kernels.passes.integer_forms import Real
from tests.builder.kernels.integer_machines import const, device, run_here

SCALE, ZERO = 0.05, 100
NUMBERS = (np.arange(256) - ZERO) * SCALE


def real(dtype: str = "uint8", scale: Any = SCALE) -> Real:
    integers = relax.Var("x", relax.TensorType((4,), dtype))
    return Real(integers, np.asarray(scale, "f8"), np.asarray(ZERO, "f8"), 0)


def call(name: str, *others: relax.Expr) -> Any:
    x = relax.Var("y", relax.TensorType((4,), "float32"))
    operator = relax.op
    for part in name.split("."):
        operator = getattr(operator, part)
    return operator(x, *others)


def test_a_formula_is_its_256_results() -> None:
    x = ByteFunction.identity(real())
    assert x is not None
    assert not x.is_long
    gate = ByteFunction.of(call("sigmoid"), [x])
    assert gate is not None
    assert gate.is_long
    both = ByteFunction.of(call("multiply", const(np.zeros(4), "float32")), [x, gate])
    assert both is not None
    assert both.is_long
    np.testing.assert_allclose(both.numbers, NUMBERS / (1 + np.exp(-NUMBERS)))
    clipped = ByteFunction.of(call("clip", 0.0, 6.0), [x])
    assert clipped is not None
    np.testing.assert_allclose(clipped.numbers, np.clip(NUMBERS, 0, 6))


def test_functions_of_other_tensors_are_none() -> None:
    x, other = ByteFunction.identity(real()), ByteFunction.identity(real())
    assert x is not None
    assert other is not None
    assert ByteFunction.of(call("add", const(np.zeros(4), "float32")), [x, other]) is None
    assert ByteFunction.of(call("sigmoid"), [1.0]) is None
    assert ByteFunction.identity(real("int8")) is None
    assert ByteFunction.identity(real(scale=[0.1, 0.2])) is None


def test_results_that_are_no_numbers_have_no_bytes() -> None:
    x = ByteFunction.identity(real())
    assert x is not None
    quotient = ByteFunction.of(call("divide", const(np.zeros(4), "float32")), [x, x])
    assert quotient is not None
    assert quotient.quantised(0.1, 3) is None
    same = x.quantised(SCALE, ZERO)
    assert same is not None
    assert same.tolist() == list(range(256))


def _hard_swish(y: relax.Expr) -> relax.Expr:
    gate = relax.op.clip(relax.op.add(y, const(3, "float32")), 0, 6)
    return relax.op.divide(relax.op.multiply(y, gate), const(6, "float32"))


# Formula, the same with NumPy, and whether a table takes fewer instructions.
FORMULAS = {
    "gate": (
        lambda y: relax.op.multiply(y, relax.op.sigmoid(y)),
        NUMBERS / (1 + np.exp(-NUMBERS)),
        True,
    ),
    "hard swish": (_hard_swish, NUMBERS * np.clip(NUMBERS + 3, 0, 6) / 6, True),
    "limits": (lambda y: relax.op.clip(y, -1, 6), np.clip(NUMBERS, -1, 6), False),
}


@pytest.mark.parametrize("name", ["host", "cascadelake", "rpi5"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_a_long_formula_is_one_table_where_that_is_faster(name: str, formula: str) -> None:
    x = np.arange(256, dtype="u1").reshape(1, 16, 4, 4)
    compute, numbers, is_long = FORMULAS[formula]

    def build(v: relax.Expr) -> relax.Expr:
        y = compute(relax.op.dequantize(v, const(SCALE, "float32"), const(ZERO, "uint8"), axis=0))
        return relax.op.quantize(y, const(0.031, "float32"), const(7, "uint8"), axis=0, out_dtype="uint8")

    result = run_here(build, {"x": x}, device(name))
    steps = numbers / np.float32(0.031)
    expected = np.clip(np.rint(steps) + 7, 0, 255).reshape(x.shape)
    assert np.abs(np.abs(steps - np.floor(steps)) - 0.5).min() > 1e-4
    assert np.array_equal(result.outputs[0], expected)
    names = [var.name_hint for var in result.lowered.kernels.functions]
    assert any("look_up" in each for each in names) is (is_long and device(name).looks_up_bytes)
