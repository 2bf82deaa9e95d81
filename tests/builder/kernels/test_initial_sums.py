"""Sums start from the bias, unless they are also needed without it, or the bias is no argument."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax, te
from tvm import s_tir as st
from tvm_ffi import structural_equal

from builder.kernels.initial_sums import start_from_bias
from tests.builder.kernels.machines import (
    Randn,
    close,
    conv2d,
    element_machine,
    lower_expression,
    machine,
    run,
)

Epilogue = Callable[[relax.Expr, relax.Expr], relax.Expr]


def bias_is_added(epilogue: Epilogue) -> bool:
    """Whether a block after the sums of a convolution adds the bias; else they start from it."""
    w, bias = np.ones((16, 16, 1, 1), "float32"), np.ones((1, 16, 1, 1), "float32")
    data = {"x": np.ones((1, 16, 9, 9), "float32")}

    def build(x: relax.Expr) -> relax.Expr:
        return epilogue(relax.op.nn.conv2d(x, relax.const(w)), relax.const(bias))

    scripts = [
        f.script() for f in lower_expression(build, data, element_machine()).kernels.functions.values()
    ]
    (kernel,) = [script for script in scripts if "conv_init" in script]
    starts = "conv_intermediate[v_n, v_o, v_y, v_z, v_v] = T.float32(0.0)" in kernel
    adds = "] + param" in kernel
    assert starts == adds
    return adds


@pytest.mark.slow
def test_sums_start_from_the_bias() -> None:
    assert not bias_is_added(lambda y, b: relax.op.clip(relax.op.add(y, b), 0, 6))


@pytest.mark.slow
def test_sums_that_are_used_twice_with_the_bias_start_from_it() -> None:
    def swish(y: relax.Expr, b: relax.Expr) -> relax.Expr:
        z = relax.op.add(y, b)
        return relax.op.multiply(z, relax.op.clip(z, 0, 1))

    assert not bias_is_added(swish)


@pytest.mark.slow
def test_sums_that_are_needed_without_the_bias_start_from_zero() -> None:
    assert bias_is_added(lambda y, b: relax.op.multiply(relax.op.add(y, b), y))


@pytest.mark.slow
@pytest.mark.parametrize(("channels", "lanes"), [(16, 4), (21, 8), (21, 16)])
def test_bias_scale_and_residual_agree_with_their_definition(channels: int, lanes: int, randn: Randn) -> None:
    x, w, scale, bias = randn(2, 16, 9, 9), randn(channels, 16, 1, 1), randn(channels), randn(channels)
    residual = randn(2, channels, 9, 9)
    constants = [relax.const(v.reshape(1, -1, 1, 1)) for v in (scale, bias)]

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = relax.op.add(relax.op.nn.conv2d(v, relax.const(w)), constants[1])
        return relax.op.nn.relu(relax.op.add(relax.op.multiply(y, constants[0]), r))

    got = run(build, {"x": x, "r": residual}, machine(lanes)).outputs[0]
    want = (conv2d(x, w) + bias.reshape(1, -1, 1, 1)) * scale.reshape(1, -1, 1, 1) + residual
    close(got, np.maximum(want, 0))


def test_a_sum_of_sums_that_is_the_result_is_no_bias(randn: Randn) -> None:
    """The block that adds partial sums reads the result, which is smaller than they are, beside them."""
    x = randn(6, 8, 4)

    def total(data: te.Tensor) -> te.Tensor:
        i, j = te.reduce_axis((0, 8), "i"), te.reduce_axis((0, 4), "j")
        parts = te.compute((6, 8), lambda n, p: te.sum(data[n, p, j], axis=j), name="parts")
        return te.compute((6,), lambda n: te.sum(parts[n, i], axis=i), name="total")

    data = te.placeholder(x.shape, name="data")
    sch = st.Schedule(te.create_prim_func([data, total(data)]))
    for name in ("parts", "total"):
        block = sch.get_sblock(name)
        sch.decompose_reduction(block, sch.get_loops(block)[-1])
    before = sch.mod["main"]
    assert structural_equal(start_from_bias(before), before)
