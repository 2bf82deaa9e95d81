"""Calls of functions become arithmetic when code is generated, wherever they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from tests.builder.kernels.machines import close, lower_expression, machine, run


def mish(x: relax.Expr) -> relax.Expr:
    softplus = relax.op.log(relax.op.add(relax.const(1.0), relax.op.exp(x)))
    return relax.op.multiply(x, relax.op.tanh(softplus))


def nested(x: relax.Expr) -> relax.Expr:
    inner = x
    for _ in range(4):
        inner = relax.op.sin(relax.op.log(relax.op.add(relax.op.abs(inner), relax.const(2.0))))
    return inner


def nested_in_numpy(x: np.ndarray) -> np.ndarray:
    for _ in range(4):
        x = np.sin(np.log(np.abs(x) + 2))
    return x


def padded(x: relax.Expr) -> relax.Expr:
    return relax.op.nn.pad(relax.op.log(relax.op.abs(x)), (1, 2, 3, 1), pad_value=7.0)


def padded_inside(x: relax.Expr) -> relax.Expr:
    waves = relax.op.add(relax.op.nn.pad(relax.op.cos(x), (0, 1, 2, 0)), relax.const(3.0))
    return relax.op.sqrt(relax.op.log(waves))


def padded_formula_of_a_formula(x: relax.Expr) -> relax.Expr:
    logarithm = relax.op.log(relax.op.add(relax.op.abs(x), relax.const(1.0)))
    return relax.op.nn.pad(relax.op.sin(logarithm), (1, 0, 0, 3))


def of_two(x: relax.Expr) -> relax.Expr:
    return relax.op.multiply(relax.op.log(relax.op.abs(x)), relax.op.cos(x))


CASES: dict[str, tuple[Callable[[relax.Expr], relax.Expr], Callable[[np.ndarray], np.ndarray]]] = {
    "mish": (mish, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "of two": (of_two, lambda x: np.log(np.abs(x)) * np.cos(x)),
    "padded": (padded, lambda x: np.pad(np.log(np.abs(x)), ((1, 2), (3, 1)), constant_values=7.0)),
    "padded inside": (padded_inside, lambda x: np.sqrt(np.log(np.pad(np.cos(x), ((0, 1), (2, 0))) + 3))),
    "padded, of a formula": (
        padded_formula_of_a_formula,
        lambda x: np.pad(np.sin(np.log(np.abs(x) + 1)), ((1, 0), (0, 3))),
    ),
    "nested": (nested, nested_in_numpy),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lanes", [4, 8])
def test_a_formula_is_right_wherever_it_is_called(name: str, lanes: int) -> None:
    build, reference = CASES[name]
    target = machine(lanes)
    x = np.linspace(-9, 9, 1003, dtype="f4").reshape(17, 59) + 1e-3
    close(run(build, {"x": x}, target).outputs[0], reference(x.astype("f8")), 1e-6)
    if name == "padded, of a formula":  # the C library computes formulas of formulas inside a branch
        return
    lowered = lower_expression(build, {"x": x}, target)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert not [function for function in ("logf", "sinf", "cosf", "expf", "tanhf") if function in assembly]


def test_other_types_keep_their_call() -> None:
    x = np.linspace(1, 9, 100).reshape(10, 10)
    np.testing.assert_allclose(run(relax.op.log, {"x": x}, machine(8)).outputs[0], np.log(x), rtol=1e-12)
