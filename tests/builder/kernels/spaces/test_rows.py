"""Softmax and layer norm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from benchmarks.interpreter import Interpreter
from builder.kernels.spaces import rows
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, close, in_turn, lower_expression, machine, run

pytestmark = pytest.mark.slow


SHAPES = [(4, 128, 128), (2, 3, 50), (1, 10), (6, 1), (5, 17), (3, 197), (2, 16), (7, 31), (2, 1001)]


@pytest.mark.parametrize(("shape", "lanes"), in_turn(SHAPES))
def test_softmax_of_rows(shape: tuple[int, ...], lanes: int, randn: Randn) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.softmax(v, axis=-1), {"x": x}, machine(lanes))
    e = np.exp(x.astype("f8") - x.max(-1, keepdims=True))
    close(result.outputs[0], e / e.sum(-1, keepdims=True), 1e-6)
    assert result.schedules == {rows.KIND}


@pytest.mark.parametrize(("shape", "lanes"), in_turn(reversed(SHAPES)))
def test_log_softmax_of_rows(shape: tuple[int, ...], lanes: int, randn: Randn) -> None:
    x = randn(*shape) * 20
    result = run(lambda v: relax.op.nn.log_softmax(v, axis=-1), {"x": x}, machine(lanes))
    d = x.astype("f8") - x.max(-1, keepdims=True)
    close(result.outputs[0], d - np.log(np.exp(d).sum(-1, keepdims=True)), 1e-6)
    assert result.schedules == {rows.KIND}


def test_log_softmax_of_columns(target: DeviceTarget, randn: Randn) -> None:
    x = randn(3, 5, 7)
    got = run(lambda v: relax.op.nn.log_softmax(v, axis=1), {"x": x}, target).outputs[0]
    close(got, x - np.log(np.exp(x.astype("f8")).sum(1, keepdims=True)))


def test_log_softmax_of_a_masked_score_is_minus_infinity(target: DeviceTarget, randn: Randn) -> None:
    x = randn(4, 50)
    x[1, 3], x[2, 5] = -np.inf, np.nan
    got = run(lambda v: relax.op.nn.log_softmax(v, axis=-1), {"x": x}, target).outputs[0]
    assert got[1, 3] == -np.inf
    assert np.isnan(got[2]).all()
    assert np.isfinite(got[[0, 3]]).all()


@pytest.mark.parametrize("columns", [4, 16, 50, 115])
def test_masked_scores_become_exactly_zero(columns: int, target: DeviceTarget) -> None:
    x = np.tile(np.array([1.0, 2.0, -1e9, -np.inf, -90, -86], "f4"), (4, 20))[:, :columns]
    got = run(lambda v: relax.op.nn.softmax(v, axis=-1), {"x": x}, target).outputs[0]
    assert (got[x < -1000] == 0).all()
    assert not ((got > 0) & (got < np.finfo("f4").tiny)).any(), "denormal numbers are slow"
    assert np.allclose(got.sum(-1), 1)


def test_a_row_that_has_no_softmax_is_nan(target: DeviceTarget) -> None:
    x = np.zeros((4, 50), "f4")
    x[0, 3], x[1, 4], x[2] = np.nan, np.inf, -np.inf
    got = run(lambda v: relax.op.nn.softmax(v, axis=-1), {"x": x}, target).outputs[0]
    with np.errstate(all="ignore"):
        e = np.exp(x.astype("f8") - x.max(-1, keepdims=True))
    assert np.array_equal(np.isnan(got).all(-1), np.isnan(e / e.sum(-1, keepdims=True)).any(-1))


@pytest.mark.parametrize(("shape", "lanes"), in_turn([(1, 128, 768), (2, 3, 50), (8, 17), (3, 769), (5, 16)]))
def test_layer_norm(shape: tuple[int, ...], lanes: int, randn: Randn) -> None:
    x, g, b = randn(*shape) * 3 + 5, randn(shape[-1]), randn(shape[-1])
    build = lambda v: relax.op.nn.layer_norm(v, relax.const(g), relax.const(b), axes=[-1], epsilon=1e-5)  # noqa: E731
    result = run(build, {"x": x}, machine(lanes))
    d = x.astype("f8")
    want = (d - d.mean(-1, keepdims=True)) / np.sqrt(d.var(-1, keepdims=True) + 1e-5) * g + b
    close(result.outputs[0], want, 2e-6)
    assert rows.KIND in result.schedules


REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "mean": np.mean,
    "sum": np.sum,
    "max": np.max,
    "min": np.min,
}


@pytest.mark.parametrize(
    ("case", "lanes"),
    in_turn(
        [
            ((2, 3, 7, 9), (2, 3), True),
            ((4, 16), (1,), False),
            ((5, 1001), (-1,), True),
            ((3, 5, 7), (0, 1, 2), False),
            ((1, 3, 4, 8), (1, 3, 2), True),
        ]
    ),
)
def test_reductions_of_rows(
    case: tuple[tuple[int, ...], tuple[int, ...], bool], lanes: int, randn: Randn
) -> None:
    shape, axes, keepdims = case
    x = np.abs(randn(*shape))
    result = run(
        lambda v: relax.Tuple(
            [getattr(relax.op, name)(v, axis=list(axes), keepdims=keepdims) for name in REDUCTIONS]
        ),
        {"x": x},
        machine(lanes),
    )
    for got, reduced in zip(result.outputs, REDUCTIONS.values(), strict=True):
        close(got, reduced(x.astype("f8"), axis=axes, keepdims=keepdims), 1e-6)
    assert result.schedules == {rows.KIND}


@pytest.mark.parametrize("shape", [(128, 768), (3, 1000), (1, 7919), (7, 11, 23)])
def test_extrema_of_a_whole_tensor(shape: tuple[int, ...], target: DeviceTarget, randn: Randn) -> None:
    # As DynamicQuantizeLinear asks for them: in parts, which have extrema in turn.
    x = randn(*shape)
    build = lambda v: relax.Tuple([relax.op.max(v), relax.op.min(v)])  # noqa: E731
    lowered = lower_expression(build, {"x": x}, target)
    interpreter = Interpreter(lowered, target.tvm_target)
    for largest, least in ((0, x.size - 1), (x.size - 1, x.size // 2)):
        x.ravel()[[largest, least]] = 99, -99
        outputs = interpreter.run({"x": x})
        assert [float(output) for output in outputs] == [99, -99]
        assert all(output.shape == () for output in outputs)
        x.ravel()[[largest, least]] = 0
    is_divided = shape in ((128, 768), (3, 1000))
    assert len(lowered.kernels.functions) == (4 if is_divided else 2)


def test_reductions_carry_infinity_and_nan(target: DeviceTarget, randn: Randn) -> None:
    x = randn(4, 33)
    x[0, 5], x[1, 32], x[2, :], x[3, :] = np.inf, -np.inf, -np.inf, np.inf
    build = lambda v: relax.Tuple([getattr(relax.op, name)(v, axis=[1]) for name in REDUCTIONS])  # noqa: E731
    interpreter = Interpreter(lower_expression(build, {"x": x}, target), target.tvm_target)
    for got, reduced in zip(interpreter.run({"x": x}), REDUCTIONS.values(), strict=True):
        np.testing.assert_allclose(got, reduced(x, axis=1), rtol=1e-5)
    x[:] = np.nan
    mean, total, _, _ = interpreter.run({"x": x})
    assert np.isnan(mean).all()
    assert np.isnan(total).all()


@pytest.mark.parametrize(
    ("shape", "axes", "decomposed"),
    [((2, 3, 7, 9), [2, 3], False), ((1, 4, 77), [2], True), ((2, 3, 2, 5, 3), [2, 3, 4], True)],
)
def test_instance_norm_is_one_kernel(
    shape: tuple[int, ...], axes: list[int], decomposed: bool, target: DeviceTarget, randn: Randn
) -> None:
    x = randn(*shape)

    def build(v: relax.Expr) -> relax.Expr:
        centred = relax.op.subtract(v, relax.op.mean(v, axis=axes, keepdims=True))
        if decomposed:
            variance = relax.op.mean(relax.op.multiply(centred, centred), axis=axes, keepdims=True)
        else:
            variance = relax.op.variance(v, axis=axes, keepdims=True)
        return relax.op.divide(centred, relax.op.sqrt(relax.op.add(variance, relax.const(1e-3, "float32"))))

    result = run(build, {"x": x}, target)
    wide = x.astype("f8")
    centred = wide - wide.mean(tuple(axes), keepdims=True)
    close(result.outputs[0], centred / np.sqrt(wide.var(tuple(axes), keepdims=True) + 1e-3))
    assert result.schedules == {rows.KIND}


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "count"), [((2, 6, 5, 7), 3), ((3, 4, 20), 2), ((5, 9), 2)])
def test_layer_norm_of_several_axes(
    shape: tuple[int, ...], count: int, target: DeviceTarget, randn: Randn
) -> None:
    x, gain, shift = randn(*shape), randn(*shape[-count:]), randn(*shape[-count:])
    axes = list(range(len(shape) - count, len(shape)))
    build = lambda v: relax.op.nn.layer_norm(v, relax.const(gain), relax.const(shift), axes)  # noqa: E731
    result = run(build, {"x": x}, target)
    y = x.astype("f8")
    mean, variance = (f(y, axis=tuple(axes), keepdims=True) for f in (np.mean, np.var))
    close(result.outputs[0], (y - mean) / np.sqrt(variance + 1e-5) * gain + shift, 1e-5)
    assert rows.KIND in result.schedules
