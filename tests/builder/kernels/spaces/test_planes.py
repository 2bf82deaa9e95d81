"""Instance norm of packed planes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import planes
from tests.builder.kernels.machines import Result, close, conv2d, machine, run

EPSILON = 1e-5


def normalise(x: np.ndarray, weight: np.ndarray, lanes: int, *, then: str) -> Result:
    """Run a convolution, an instance norm as exporters write it, and an activation; compare with NumPy."""
    n, c = x.shape[0], weight.shape[0]
    gain, shift = np.linspace(0.5, 2, c, dtype="f4"), np.linspace(-1, 1, c, dtype="f4")

    def build(x: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(x, relax.const(weight))
        mean = relax.op.mean(y, [2, 3], keepdims=True)
        variance = relax.op.variance(y, [2, 3], keepdims=True)
        root = relax.op.sqrt(relax.op.add(variance, relax.const(EPSILON, "float32")))
        y = relax.op.divide(relax.op.subtract(y, mean), root)
        if then == "nothing":
            return y
        y = relax.op.add(
            relax.op.multiply(y, relax.const(gain.reshape(1, c, 1, 1))),
            relax.const(shift.reshape(1, c, 1, 1)),
        )
        return relax.op.multiply(y, relax.op.sigmoid(y))

    result = run(build, {"x": x}, machine(lanes))
    y = conv2d(x, weight).astype("f8")
    y = (y - y.mean((2, 3), keepdims=True)) / np.sqrt(y.var((2, 3), keepdims=True) + EPSILON)
    if then != "nothing":
        y = y * gain.reshape(1, c, 1, 1) + shift.reshape(1, c, 1, 1)
        y = y / (1 + np.exp(-y))
    assert result.outputs[0].shape == (n, *y.shape[1:])
    close(result.outputs[0], y, 2e-5)
    return result


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 2),
    channels=st.integers(2, 40),
    rows=st.integers(1, 9),
    columns=st.integers(2, 33),
    lanes=st.sampled_from([4, 8, 16]),
    then=st.sampled_from(["nothing", "SiLU"]),
)
def test_any_planes(batch: int, channels: int, rows: int, columns: int, lanes: int, then: str) -> None:
    state = np.random.RandomState(channels)
    x, weight = state.randn(batch, 8, rows, columns), state.randn(channels, 8, 1, 1)
    normalise(x.astype("f4"), weight.astype("f4"), lanes, then=then)


@pytest.mark.parametrize("then", ["nothing", "SiLU"])
def test_channels_stay_packed(then: str) -> None:
    state = np.random.RandomState(3)
    x, weight = state.randn(1, 16, 12, 12).astype("f4"), state.randn(32, 16, 1, 1).astype("f4")
    assert planes.KIND in normalise(x, weight, 8, then=then).schedules
