"""Decomposed operators become one again, and reshapes do not stop fusion."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import matmul, rows
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, machine, run

op = relax.op


@pytest.fixture
def target() -> DeviceTarget:
    """One width: the operators are rewritten before anything depends on it."""
    return machine(8)


def decomposed(x: relax.Expr, square: str, root: str, axis: int = -1) -> relax.Expr:
    """Return a layer norm as exporters decompose it, without gain and shift."""
    centred = op.subtract(x, op.mean(x, axis, keepdims=True))
    if square == "power":
        squared = op.power(centred, relax.const(np.float32(2)))
    else:
        squared = op.multiply(centred, centred)
    variance = op.add(op.mean(squared, axis, keepdims=True), relax.const(np.float32(1e-3)))
    if root == "sqrt":
        return op.divide(centred, op.sqrt(variance))
    return op.multiply(centred, op.rsqrt(variance))


def norm(x: np.ndarray, axis: int = -1) -> np.ndarray:
    x = x.astype("f8")
    centred = x - x.mean(axis, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(axis, keepdims=True) + 1e-3))


@pytest.mark.parametrize("square", ["power", "multiply"])
@pytest.mark.parametrize("root", ["sqrt", "rsqrt"])
def test_decomposed_layer_norm_is_one_kernel(
    square: str, root: str, target: DeviceTarget, randn: Randn
) -> None:
    x, gain, shift = randn(2, 5, 48), randn(48), randn(48)
    build = lambda v: op.add(  # noqa: E731
        op.multiply(decomposed(v, square, root), relax.const(gain)), relax.const(shift)
    )
    result = run(build, {"x": x}, target)
    close(result.outputs[0], norm(x) * gain + shift)
    assert result.schedules == {rows.KIND}
    assert len(result.lowered.kernels.functions) == 1


def test_layer_norm_without_gain_or_with_only_a_gain(target: DeviceTarget, randn: Randn) -> None:
    x, gain = randn(3, 32), randn(32)
    close(run(lambda v: decomposed(v, "power", "sqrt"), {"x": x}, target).outputs[0], norm(x))
    build = lambda v: op.multiply(relax.const(gain), decomposed(v, "power", "sqrt"))  # noqa: E731
    result = run(build, {"x": x}, target)
    close(result.outputs[0], norm(x) * gain)
    assert result.schedules == {rows.KIND}


@pytest.mark.slow
def test_norm_along_another_axis_and_a_twofold_gain_stay_right(target: DeviceTarget, randn: Randn) -> None:
    x, gain = randn(6, 32), randn(32)
    close(run(lambda v: decomposed(v, "power", "sqrt", axis=0), {"x": x}, target).outputs[0], norm(x, 0))

    def twice(v: relax.Expr) -> relax.Expr:
        y = op.multiply(op.multiply(decomposed(v, "power", "sqrt"), relax.const(gain)), relax.const(gain))
        return op.multiply(op.add(y, relax.const(gain)), relax.const(gain))

    close(run(twice, {"x": x}, target).outputs[0], (norm(x) * gain * gain + gain) * gain)


def test_deviation_from_one_tensor_over_the_spread_of_another(target: DeviceTarget, randn: Randn) -> None:
    x, y = randn(4, 32), randn(4, 32)

    def build(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        other = op.subtract(b, op.mean(b, -1, keepdims=True))
        variance = op.mean(op.multiply(other, other), -1, keepdims=True)
        root = op.sqrt(op.add(variance, relax.const(np.float32(1e-3))))
        return op.divide(op.subtract(a, op.mean(a, -1, keepdims=True)), root)

    spread = np.sqrt(y.astype("f8").var(-1, keepdims=True) + 1e-3)
    want = (x.astype("f8") - x.mean(-1, keepdims=True, dtype="f8")) / spread
    close(run(build, {"x": x, "y": y}, target).outputs[0], want)


def test_reshapes_around_a_product_do_not_stop_fusion(target: DeviceTarget, randn: Randn) -> None:
    x, w, b, residual = randn(1, 8, 32), randn(32, 48), randn(48), randn(1, 8, 48)

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = op.matmul(op.reshape(v, (8, 32)), relax.const(w))
        y = op.reshape(op.add(y, relax.const(b)), (1, 8, 48))
        return op.add(op.nn.relu(y), r)

    result = run(build, {"x": x, "r": residual}, target)
    close(result.outputs[0], np.maximum(x.astype("f8") @ w + b, 0) + residual)
    assert result.schedules == {matmul.KIND}
    assert len(result.lowered.kernels.functions) == 1


def test_rows_that_come_from_heads_take_their_residual_flat(target: DeviceTarget, randn: Randn) -> None:
    x, w, residual = randn(1, 8, 4, 8), randn(32, 48), randn(1, 8, 48)

    def build(v: relax.Expr, r: relax.Expr) -> relax.Expr:
        y = op.reshape(op.matmul(op.reshape(v, (8, 32)), relax.const(w)), (1, 8, 48))
        return op.add(r, y)

    result = run(build, {"x": x, "r": residual}, target)
    close(result.outputs[0], x.reshape(1, 8, 32).astype("f8") @ w + residual)
    assert len(result.lowered.kernels.functions) == 1


def test_bias_along_rows_is_not_taken_for_one_along_columns(target: DeviceTarget, randn: Randn) -> None:
    x, w, b = randn(8, 32), randn(32, 8), randn(8, 1)

    def build(v: relax.Expr) -> relax.Expr:
        y = op.reshape(op.matmul(v, relax.const(w)), (1, 8, 8))
        return op.add(y, relax.const(b))

    close(run(build, {"x": x}, target).outputs[0], (x.astype("f8") @ w + b)[None])


def test_division_is_a_product_only_where_that_is_exact(target: DeviceTarget) -> None:
    x = np.arange(-300, 300, dtype="f4").reshape(1, 600)
    for divisor in (3.0, 8.0):
        build = lambda v, d=divisor: op.floor(op.divide(v, relax.const(np.float32(d))))  # noqa: E731
        assert np.array_equal(run(build, {"x": x}, target).outputs[0], np.floor(x / np.float32(divisor)))


def test_a_hard_swish_has_no_division(target: DeviceTarget, randn: Randn) -> None:
    x = randn(3, 40) * 4
    three, six = relax.const(np.float32(3)), relax.const(np.float32(6))
    build = lambda v: op.multiply(v, op.divide(op.clip(op.add(v, three), 0, 6), six))  # noqa: E731
    result = run(build, {"x": x}, target)
    close(result.outputs[0], x * np.clip(x.astype("f8") + 3, 0, 6) / 6)
    assert " / " not in str(result.lowered.kernels.script())


@pytest.mark.parametrize("heads", [(2,), (1, 3)], ids=str)
def test_attention_of_channels_copies_no_probabilities(heads: tuple[int, ...], randn: Randn) -> None:
    q, k, v = randn(*heads, 33, 6), randn(*heads, 6, 40), randn(*heads, 5, 40)

    def build(a: relax.Expr, b: relax.Expr, c: relax.Expr) -> relax.Expr:
        rows = relax.op.nn.softmax(relax.op.matmul(a, b), -1)
        rank = len(heads) + 2
        turned = relax.op.permute_dims(rows, [*range(rank - 2), rank - 1, rank - 2])
        return relax.op.matmul(c, turned)

    result = run(build, {"q": q, "k": k, "v": v}, machine(16))
    scores = np.exp(q.astype("f8") @ k)
    weights = scores / scores.sum(-1, keepdims=True)
    close(result.outputs[0], v @ np.swapaxes(weights, -1, -2))
    sizes = [
        np.prod([int(d) for d in func.params[-1].shape])
        for func in result.lowered.kernels.functions.values()
        if str(func.attrs["edge.schedule"]) == "transpose"
    ]
    assert all(size < np.prod(heads) * 33 * 40 for size in sizes)
