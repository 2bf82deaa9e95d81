"""One form for each operator."""

from __future__ import annotations

import numpy as np
from tvm import relax

from tests.builder.kernels.machines import Randn, Result, close, machine, run


def kernels(result: Result) -> str:
    """Return the names of all kernels, which say what they compute."""
    return " ".join(g.name_hint for g in result.lowered.kernels.functions)


def number(value: float) -> relax.Expr:
    return relax.const(np.array(value, "f4"))


def test_a_maximum_and_a_minimum_with_a_number_are_a_clip(randn: Randn) -> None:
    x = 5 * randn(2, 12)
    build = lambda v: relax.op.minimum(relax.op.maximum(v, number(-1.0)), number(6.0))  # noqa: E731
    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], np.clip(x, -1, 6))
    assert "clip" in kernels(result)
    assert "maximum" not in kernels(result)


def test_bounds_that_differ_by_element_are_no_clip(randn: Randn) -> None:
    x, low = 5 * randn(2, 12), randn(2, 12)
    build = lambda v: relax.op.minimum(relax.op.maximum(v, relax.const(low)), number(1.0))  # noqa: E731
    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], np.minimum(np.maximum(x, low), 1))
    assert "clip" not in kernels(result)


def test_crossed_bounds_give_the_lower_one_if_it_comes_last(randn: Randn) -> None:
    x = 5 * randn(2, 12)
    build = lambda v: relax.op.maximum(relax.op.minimum(v, number(-2.0)), number(1.0))  # noqa: E731
    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], np.ones_like(x))


def test_crossed_bounds_give_the_upper_one_if_it_comes_last(randn: Randn) -> None:
    x = 5 * randn(2, 12)
    build = lambda v: relax.op.minimum(relax.op.maximum(v, number(3.0)), number(-1.0))  # noqa: E731
    close(run(build, {"x": x}, machine(8)).outputs[0], np.full_like(x, -1))


def test_a_maximum_with_other_readers_is_kept_for_them(randn: Randn) -> None:
    x = 5 * randn(2, 12)

    def build(v: relax.Expr) -> relax.Expr:
        low = relax.op.maximum(v, number(0.5))
        return relax.op.add(relax.op.minimum(low, number(2.0)), low)

    close(run(build, {"x": x}, machine(8)).outputs[0], np.clip(x, 0.5, 2) + np.maximum(x, 0.5))
