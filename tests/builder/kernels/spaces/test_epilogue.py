"""Operators that are fused after a convolution or a product."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from tests.builder.kernels.machines import Randn, close, conv2d, lower_expression, machine, run

pytestmark = pytest.mark.slow

# A row of the picture may be unrolled; 28 rows of 28 are multiplied by 784 or more.
_MAX_PRODUCTS = 150


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("extent", [14, 28])
def test_a_gate_over_a_picture_is_a_loop(randn: Randn, lanes: int, extent: int) -> None:
    """Squeeze and excite: each channel of a picture is multiplied by the gate that a convolution gives."""
    pooled, picture, weights = randn(1, 16, 1, 1), randn(1, 60, extent, extent), randn(60, 16, 1, 1)

    def build(x: relax.Expr, y: relax.Expr) -> relax.Expr:
        gate = relax.op.nn.conv2d(x, relax.const(weights))
        gate = relax.op.clip(relax.op.add(gate, relax.const(np.float32(0.5))), 0, 1)
        return relax.op.multiply(relax.op.nn.relu(y), gate)

    inputs = {"x": pooled, "y": picture}
    want = np.maximum(picture, 0) * np.clip(conv2d(pooled, weights) + np.float32(0.5), 0, 1)
    close(run(build, inputs, machine(lanes)).outputs[0], want)
    kernels = lower_expression(build, inputs, machine(lanes)).kernels
    assembly = build_kernels(kernels, machine(lanes).tvm_target).inspect_source("asm")
    assert 0 < assembly.count("mulps") < _MAX_PRODUCTS


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("lanes", [4, 16])
def test_one_column_is_added_to_many(randn: Randn, rows: int, lanes: int) -> None:
    """A dueling network: the value of a state, one number, is added to the advantage of each action."""
    x, weights, advantages = randn(rows, 33), randn(33, 1), randn(rows, 18)

    def build(v: relax.Expr, w: relax.Expr) -> relax.Expr:
        value = relax.op.add(relax.op.matmul(v, relax.const(weights)), relax.const(np.ones(1, "f4")))
        return relax.op.nn.relu(relax.op.add(value, w))

    result = run(build, {"x": x, "a": advantages}, machine(lanes))
    close(result.outputs[0], np.maximum(x.astype("f8") @ weights + 1 + advantages, 0))
    assert "matmul" in str(result.schedules)
