"""One form for each operator."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

from builder.kernels.passes.canonical import canonicalise
from tests.builder.kernels.machines import Build, Randn, Result, close, conv2d, machine, run


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


@pytest.mark.parametrize(
    "build",
    [
        lambda v: relax.op.add(v, relax.op.exp(number(2.0))),
        lambda v: relax.op.add(v, relax.op.exp(relax.op.exp(number(0.5)))),
        lambda v: relax.op.add(v, relax.op.full_like(v, number(3.0))),
        lambda v: relax.op.add(v, relax.op.ones([2, 3], "float32")),
        lambda v: relax.op.concat([relax.op.exp(v), relax.op.exp(relax.const(np.ones((1, 3), "f4")))]),
    ],
    ids=["one call", "a chain", "like another tensor", "no tensor", "in a tuple"],
)
def test_what_depends_only_on_constants_is_folded(build: Build) -> None:
    """TVM's pass is skipped if there is nothing for it to do; here it must have run."""
    mod = canonicalised(build)
    with machine(8).tvm_target:
        assert tvm_ffi.structural_equal(mod, relax.transform.FoldConstant()(mod))


def canonicalised(build: Build) -> tvm.IRModule:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(build(x)))
        bb.emit_func_output(out)
    with machine(8).tvm_target:
        return canonicalise(bb.get())


def test_a_power_of_two_is_a_square_and_stays_packed(randn: Randn) -> None:
    x, w = randn(1, 8, 5, 6), randn(16, 8, 1, 1)
    back = randn(8, 16, 1, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.power(relax.op.nn.conv2d(v, relax.const(w)), number(2.0))
        return relax.op.nn.conv2d(y, relax.const(back))

    result = run(build, {"x": x}, machine(8))
    close(result.outputs[0], conv2d(conv2d(x, w) ** 2, back))
    assert "square" in kernels(result)
    assert kernels(result).count("unpack") == 1
