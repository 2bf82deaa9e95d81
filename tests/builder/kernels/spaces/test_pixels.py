"""Reductions and layer norm over the channels of packed images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.kernels.spaces import pixels
from tests.builder.kernels.machines import Build, Randn, Result, close, conv2d, machine, run

EPSILON: Final = 1e-5
REDUCTIONS: Final[Mapping[str, tuple[Callable[..., relax.Expr], Callable[..., np.ndarray]]]] = {
    "mean": (relax.op.mean, np.mean),
    "sum": (relax.op.sum, np.sum),
    "max": (relax.op.max, np.max),
    "min": (relax.op.min, np.min),
}


SIZES: Final = {
    "batch": st.integers(1, 2),
    "channels": st.integers(2, 40),
    "rows": st.integers(1, 9),
    "columns": st.integers(1, 35),
}
LANES: Final = st.sampled_from([4, 8, 16])


def made(batch: int, channels: int, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return an image of 8 channels and the weights of a convolution of its pixels to `channels`."""
    state = np.random.RandomState(channels)
    return (
        state.randn(batch, 8, rows, columns).astype("f4"),
        state.randn(channels, 8, 1, 1).astype("f4"),
    )


def after_convolution(operator: Build, x: np.ndarray, weight: np.ndarray, lanes: int) -> Result:
    """Run an operator on the packed output of a convolution."""
    return run(lambda v: operator(relax.op.nn.conv2d(v, relax.const(weight))), {"x": x}, machine(lanes))


def written_out(y: relax.Expr, c: int, *, square: str) -> relax.Expr:
    """Return a layer norm over channels as exporters write it, with a gain and a shift."""
    mean = relax.op.mean(y, [1], keepdims=True)
    difference = relax.op.subtract(y, mean)
    if square == "variance":
        variance = relax.op.variance(y, [1], keepdims=True)
    elif square == "power":
        other = relax.op.subtract(y, mean)  # not the same node
        variance = relax.op.mean(relax.op.power(other, relax.const(2.0, "float32")), [1], keepdims=True)
    else:
        variance = relax.op.mean(relax.op.multiply(difference, difference), [1], keepdims=True)
    root = relax.op.sqrt(relax.op.add(variance, relax.const(EPSILON, "float32")))
    gain = relax.const(np.linspace(0.5, 2, c, dtype="f4").reshape(1, c, 1, 1))
    shift = relax.const(np.linspace(-1, 1, c, dtype="f4").reshape(1, c, 1, 1))
    return relax.op.add(relax.op.multiply(relax.op.divide(difference, root), gain), shift)


def in_numpy(y: np.ndarray) -> np.ndarray:
    c = y.shape[1]
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + EPSILON)
    gain, shift = np.linspace(0.5, 2, c), np.linspace(-1, 1, c)
    return np.asarray(y * gain.reshape(1, c, 1, 1) + shift.reshape(1, c, 1, 1))


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.fixed_dictionaries(SIZES),
    lanes=LANES,
    square=st.sampled_from(["variance", "power", "product"]),
)
def test_any_layer_norm(sizes: dict[str, int], lanes: int, square: str) -> None:
    x, weight = made(**sizes)
    result = after_convolution(lambda y: written_out(y, sizes["channels"], square=square), x, weight, lanes)
    close(result.outputs[0], in_numpy(conv2d(x, weight)), 5e-5)
    assert pixels.KIND in result.schedules


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.fixed_dictionaries(SIZES),
    lanes=LANES,
    name=st.sampled_from(sorted(REDUCTIONS)),
    keeps=st.booleans(),
)
def test_any_reduction(sizes: dict[str, int], lanes: int, name: str, keeps: bool) -> None:
    x, weight = made(**sizes)
    operator, definition = REDUCTIONS[name]
    result = after_convolution(lambda y: operator(y, [1], keepdims=keeps), x, weight, lanes)
    close(result.outputs[0], definition(conv2d(x, weight), axis=1, keepdims=keeps))
    assert pixels.KIND in result.schedules


def test_a_norm_between_transposes(randn: Randn) -> None:
    x, weight, gain, shift = randn(1, 8, 5, 7), randn(24, 8, 1, 1), randn(24), randn(24)

    def build(y: relax.Expr) -> relax.Expr:
        rows = relax.op.permute_dims(y, [0, 2, 3, 1])
        rows = relax.op.nn.layer_norm(rows, relax.const(gain), relax.const(shift), axes=-1, epsilon=EPSILON)
        return relax.op.permute_dims(rows, [0, 3, 1, 2])

    result = after_convolution(build, x, weight, 8)
    y = conv2d(x, weight)
    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + EPSILON)
    close(result.outputs[0], y * gain.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1), 5e-5)
    assert pixels.KIND in result.schedules
    assert not any("transpose" in var.name_hint for var in result.lowered.kernels.functions)


@pytest.mark.parametrize(("name", "infinity"), [("max", -np.inf), ("min", np.inf)])
def test_a_pixel_of_infinities(name: str, infinity: float, randn: Randn) -> None:
    x = randn(1, 8, 3, 5)
    x[0, :, 1, 2] = infinity
    operator, definition = REDUCTIONS[name]
    build = lambda v: operator(relax.op.nn.avg_pool2d(v), [1], keepdims=True)  # noqa: E731 - which packs
    result = run(build, {"x": x}, machine(8))
    assert (result.outputs[0] == definition(x, axis=1, keepdims=True)).all()
