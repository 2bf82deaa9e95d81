"""Quantised layers computed with their integers, against the same formulas in double precision.

A layer is written once, for two interpreters: `_Graph` makes Relax, `_Numbers` computes with NumPy what the
model says. Both must give equal bytes; data is chosen so that no value is halfway between two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import integer_convolution, integer_depthwise, integer_matmul, integer_winograd
from tests.builder.kernels.integer_machines import any_bytes, const, device, lower_for, run_here
from tests.builder.kernels.machines import Result, conv2d

_HALF = 1e-4
"""How close to a half a quotient may be: float32 numbers round it the same way."""


@pytest.fixture(autouse=True)
def _directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolve directly: Winograd's kernels have tests of their own, and are long code."""
    monkeypatch.setattr(integer_winograd, "output_tile", lambda *_: None)


class _Graph:
    """Makes Relax."""

    def constant(self, value: np.ndarray) -> relax.Expr:
        return relax.const(value)

    def dq(self, x: Any, scale: Any, zero: Any, dtype: str, axis: int = 0) -> Any:
        x = relax.const(x) if isinstance(x, np.ndarray) else x
        return relax.op.dequantize(x, const(scale, "float32"), const(zero, dtype), axis=axis)

    def q(self, x: Any, scale: float, zero: int, dtype: str) -> Any:
        return relax.op.quantize(x, const(scale, "float32"), const(zero, dtype), axis=0, out_dtype=dtype)

    def conv(self, x: Any, w: Any, **how: Any) -> Any:
        return relax.op.nn.conv2d(x, w, **how)

    def conv1d(self, x: Any, w: Any, padding: tuple[int, int]) -> Any:
        return relax.op.nn.conv1d(x, w, padding=padding)

    def add(self, a: Any, b: Any) -> Any:
        return relax.op.add(a, relax.const(b) if isinstance(b, np.ndarray) else b)

    def mean(self, x: Any) -> Any:
        return relax.op.mean(x, [2, 3], keepdims=True)

    def flipped(self, x: Any) -> Any:
        return relax.op.flip(x, 3)

    def sub(self, a: Any, b: Any) -> Any:
        return relax.op.subtract(a, b)

    def max_pool(self, x: Any) -> Any:
        return relax.op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1, 1, 1))

    def clip(self, x: Any, low: float, high: float) -> Any:
        return relax.op.clip(x, low, high)

    relu = staticmethod(relax.op.nn.relu)
    matmul = staticmethod(relax.op.matmul)
    reshape = staticmethod(relax.op.reshape)
    transpose = staticmethod(relax.op.permute_dims)
    concat = staticmethod(relax.op.concat)

    def crop(self, x: Any, axis: int, begin: int, end: int) -> Any:
        return relax.op.strided_slice(x, [axis], [begin], [end])


class _Numbers:
    """Computes what the model says."""

    def constant(self, value: np.ndarray) -> np.ndarray:
        return value

    def dq(self, x: Any, scale: Any, zero: Any, dtype: str, axis: int = 0) -> Any:
        del dtype
        shape = [1] * x.ndim
        shape[axis] = -1
        scale, zero = (
            np.float64(v) if np.ndim(v) == 0 else np.reshape(v, shape) for v in (np.float32(scale), zero)
        )
        return (x.astype("f8") - zero) * scale

    def q(self, x: Any, scale: float, zero: int, dtype: str) -> Any:
        info, steps = np.iinfo(dtype), x / np.float64(np.float32(scale))
        inside = (steps + zero > info.min - 1) & (steps + zero < info.max + 1)
        halves = np.abs(np.abs(steps - np.floor(steps)) - 0.5)[inside]
        assert not halves.size or halves.min() > _HALF, "choose another seed"
        return np.clip(np.rint(steps) + zero, info.min, info.max).astype(dtype)

    def conv(self, x: Any, w: Any, **how: Any) -> Any:
        return conv2d(x, w, **how)

    def conv1d(self, x: Any, w: Any, padding: tuple[int, int]) -> Any:
        return conv2d(x[:, :, None], w[:, :, None], padding=(0, padding[0], 0, padding[1]))[:, :, 0]

    def max_pool(self, x: Any) -> Any:
        x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
        return windows[:, :, ::2, ::2].max((4, 5))

    def relu(self, x: Any) -> Any:
        return np.maximum(x, 0)

    def clip(self, x: Any, low: float, high: float) -> Any:
        return np.maximum(np.minimum(x, high), low)

    add, matmul, transpose = staticmethod(np.add), staticmethod(np.matmul), staticmethod(np.transpose)
    sub = staticmethod(np.subtract)

    def mean(self, x: Any) -> Any:
        return x.mean((2, 3), keepdims=True)

    def flipped(self, x: Any) -> Any:
        return np.flip(x, 3)

    reshape = staticmethod(np.reshape)
    concat = staticmethod(np.concatenate)

    def crop(self, x: Any, axis: int, begin: int, end: int) -> Any:
        return np.take(x, range(begin, end), axis)


Layer = Callable[[Any, Any], Any]
_RANDOM = np.random.default_rng(11)
_SAME = {"padding": (1, 1, 1, 1)}
W = any_bytes(_RANDOM, (12, 10, 3, 3), "int8")
W1 = any_bytes(_RANDOM, (10, 10, 1, 1), "int8")
TOTAL = W.astype("i8").sum((1, 2, 3)).reshape(1, 12, 1, 1)
M = any_bytes(_RANDOM, (10, 7), "int8")
BIAS = _RANDOM.standard_normal((1, 12, 1, 1)).astype("f4")
SCALES = _RANDOM.uniform(1e-3, 2e-3, 12).astype("f4")


def both(layer: Layer, x: np.ndarray, name: str = "host") -> Result:
    """Run a layer on the device `name`, and compare with NumPy: bytes exactly, other numbers nearly."""

    def build(v: relax.Expr) -> relax.Expr:
        made = layer(_Graph(), v)
        return relax.Tuple(list(made)) if isinstance(made, tuple) else made

    result, wanted = run_here(build, {"x": x}, device(name)), layer(_Numbers(), x)
    for got, want in zip(result.outputs, wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
        assert got.shape == want.shape
        if got.dtype == np.float32:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * max(1, np.abs(want).max()))
        else:
            assert got.dtype == want.dtype
            assert np.array_equal(got, want), np.abs(got.astype("i8") - want).max()
    return result


def images(dtype: str = "uint8", channels: int = 10, seed: int = 12) -> np.ndarray:
    return any_bytes(np.random.default_rng(seed), (1, channels, 6, 7), dtype)


def conv(o: Any, x: Any, dtype: str = "uint8", zero: int = 117, scale: Any = 0.002, w: np.ndarray = W) -> Any:
    """A 3x3 convolution of bytes; its numbers are between about -5 and 5."""
    zeros = np.zeros(len(w), "i1") if np.ndim(scale) else 0
    return o.conv(o.dq(x, 0.01, zero, dtype), o.dq(w, scale, zeros, "int8"), **_SAME)


def bounded(*steps: tuple[float, float] | None) -> Layer:
    def layer(o: Any, x: Any) -> Any:
        y = conv(o, x)
        for bounds in steps:
            y = o.relu(y) if bounds is None else o.clip(y, *bounds)
        return o.q(y, 0.02, 100, "uint8")

    return layer


def residual(o: Any, x: Any) -> Any:
    d = o.dq(x, 0.01, 117, "uint8")
    y = o.conv(d, o.dq(W1, 0.002, 0, "int8"))
    return o.q(o.relu(o.add(d, o.dq(o.q(y, 0.03, 120, "uint8"), 0.03, 120, "uint8"))), 0.05, 3, "uint8")


def combined(operator: str, other: float) -> Layer:
    """A sum or a difference of bytes with two scales, and a convolution of it."""

    def layer(o: Any, x: Any) -> Any:
        a, b = o.dq(x, 0.0117, 117, "uint8"), o.dq(o.flipped(x), other, 3, "uint8")
        y = o.relu(getattr(o, operator)(a, b))
        d = o.dq(o.q(y, 0.0231, 5, "uint8"), 0.0231, 5, "uint8")
        return o.q(o.conv(d, o.dq(W1, 0.002, 0, "int8")), 0.1, 120, "uint8"), y

    return layer


def averaged(o: Any, x: Any) -> Any:
    """The mean of each plane, which a gate begins with, and what it gates."""
    d = o.dq(o.q(conv(o, x), 0.03, 121, "uint8"), 0.03, 121, "uint8")
    return o.q(o.mean(d), 0.00137, 99, "uint8"), o.q(o.relu(d), 0.0231, 3, "uint8")


def read_twice(o: Any, x: Any) -> Any:
    y = conv(o, x)
    return o.q(o.relu(y), 0.02, 3, "uint8"), y


def concatenated(other: float) -> Layer:
    def layer(o: Any, x: Any) -> Any:
        a = o.dq(o.q(conv(o, x), 0.03, 120, "uint8"), 0.03, 120, "uint8")
        b = o.dq(x, other, 120, "uint8")
        y = o.concat([a, b], axis=1)
        w = any_bytes(np.random.default_rng(3), (9, 22, 1, 1), "int8")
        return o.q(o.conv(y, o.dq(w, 0.002, 0, "int8")), 0.05, 128, "uint8")

    return layer


def moved(o: Any, x: Any) -> Any:
    d = o.max_pool(o.dq(x, 0.01, 117, "uint8"))
    d = o.crop(o.transpose(d, (0, 1, 3, 2)), 2, 1, 4)
    y = o.conv(o.reshape(d, (1, 10, 9, 1)), o.dq(W1, 0.002, 0, "int8"))
    return o.q(y, 0.03, 120, "uint8"), o.q(d, 0.01, 117, "uint8")


def product(o: Any, x: Any) -> Any:
    w = o.transpose(o.dq(M.T.copy(), SCALES[:7], np.zeros(7, "i1"), "int8"), (1, 0))
    y = o.matmul(o.transpose(o.dq(x, 0.01, 117, "uint8"), (0, 2, 3, 1)), w)
    return o.q(o.add(y, BIAS.ravel()[:7]), 0.03, 120, "uint8")


def grouped(groups: int, w: np.ndarray) -> Layer:
    def layer(o: Any, x: Any) -> Any:
        y = o.conv(o.dq(x, 0.01, 117, "uint8"), o.dq(w, 0.002, 0, "int8"), groups=groups, **_SAME)
        return o.q(o.add(y, BIAS[:, : len(w)]), 0.02, 120, "uint8")

    return layer


def one_dimensional(o: Any, x: Any) -> Any:
    d = o.reshape(o.dq(x, 0.01, 117, "uint8"), (1, 10, 42))
    return o.q(o.conv1d(d, o.dq(W[:, :, 0].copy(), 0.002, 0, "int8"), (2, 1)), 0.0313, 120, "uint8")


def dead_channels(o: Any, x: Any) -> Any:
    scale = np.where(np.arange(12) % 3 == 1, 0, SCALES)
    return o.q(o.add(conv(o, x, scale=scale), BIAS), 0.03, 120, "uint8")


def large_bias(o: Any, x: Any) -> Any:
    y = o.conv(o.dq(x, 2**-7, 0, "uint8"), o.dq(W, 2**-25, 0, "int8"), **_SAME)
    bias = np.full((1, 12, 1, 1), 0.5 - 2**-15, "f4")  # 2^31 - 2^17 steps; sums are up to 2^21
    return o.q(o.add(y, bias), 0.00213, 2, "uint8")


LAYERS: dict[str, Layer] = {
    "a bias that is no multiple of the scale": lambda o, x: o.q(o.add(conv(o, x), BIAS), 0.03, 120, "uint8"),
    "a bias that is one": lambda o, x: o.q(
        o.add(conv(o, x), (np.rint(BIAS * 5e4) * np.float32(2e-5)).astype("f4")), 0.03, 120, "uint8"
    ),
    "a scale for each channel": lambda o, x: o.q(o.add(conv(o, x, scale=SCALES), BIAS), 0.03, 120, "int8"),
    "channels of scale 0": dead_channels,
    "the other byte of the target": lambda o, x: o.q(conv(o, x), 0.03, -3, "int8"),
    "numbers as output": lambda o, x: o.add(conv(o, x), BIAS),
    "weights of bytes without a sign": lambda o, x: o.q(
        o.conv(o.dq(x, 0.01, 117, "uint8"), o.dq((W + np.int16(128)).astype("u1"), 0.002, 128, "uint8")),
        0.0313,
        120,
        "uint8",
    ),
    "a bias close to the end of 32 bits": large_bias,
    "weights that are wider than a byte": lambda o, x: o.q(
        o.conv(o.dq(x, 0.01, 117, "uint8"), o.dq(W, 0.002, -100, "int8")), 0.05, 120, "uint8"
    ),
    "a product whose weights are wider than a byte": lambda o, x: o.q(
        o.matmul(
            o.transpose(o.dq(x, 0.01, 117, "uint8"), (0, 2, 3, 1)),
            o.dq(M, SCALES[:7], np.arange(-60, 61, 20).astype("i1"), "int8", 1),
        ),
        0.0413,
        120,
        "uint8",
    ),
    "relu": bounded(None),
    "bounds inside the type": bounded((-0.5, 1.0)),
    "bounds outside the type": bounded((-9.0, 9.0)),
    "bounds beyond the first bounds": bounded(None, (-2.0, -1.0)),
    "bounds below the first bounds": bounded((1.0, 2.0), (-1.0, 0.5)),
    "a negative scale": lambda o, x: o.q(o.clip(conv(o, x), -1.0, 0.5), -0.02, 100, "uint8"),
    "read twice": read_twice,
    "residual of the input itself": residual,
    "means of planes": averaged,
    "sum of two scales": combined("add", 0.0191),
    "difference of two scales": combined("sub", 0.00713),
    "sum of scales that are far apart": combined("add", 1e-9),
    "sum with a scale of 0": combined("add", 0.0),
    "concatenation of one scale": concatenated(0.03),
    "concatenation of two scales": concatenated(0.01),
    "moves": moved,
    "product of four dimensions": product,
    "depthwise": grouped(10, W[:10, :1]),
    "grouped": grouped(2, W[:, :5]),
    "one dimension": one_dimensional,
}
FLOATS = {"grouped"}
DEVICES = ("host", "rpi5", "cascadelake", "rpi4")


@pytest.mark.slow
def test_bytes_that_lose_the_axis_of_their_channels() -> None:
    def layer(o: Any, x: Any) -> Any:
        row = o.reshape(o.dq(x, 0.01, 117, "uint8", axis=1), (420,))
        scale, zero = np.full(1, 0.01, "f4"), np.full(1, 117, "u1")
        one = o.dq(o.reshape(x, (60, 1, 7)), scale, zero, "uint8", axis=1)
        return row, o.relu(row), o.reshape(one, (420,))

    both(layer, images())


@pytest.mark.parametrize("name", LAYERS)
def test_bytes_are_those_of_the_model(name: str) -> None:
    at = list(LAYERS).index(name)
    result = both(LAYERS[name], images(), DEVICES[at % len(DEVICES)])
    kinds = {integer_convolution.KIND, integer_depthwise.KIND, integer_matmul.KIND}
    assert bool(kinds & result.schedules) == (name not in FLOATS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "zero"), [("cascadelake", "int8", -128), ("rpi5", "uint8", 255), ("host", "int8", 127)]
)
def test_inputs_of_the_byte_that_the_instruction_does_not_take(name: str, dtype: str, zero: int) -> None:
    result = both(lambda o, x: o.q(conv(o, x, dtype, zero), 0.0313, zero, dtype), images(dtype), name)
    assert integer_convolution.KIND in result.schedules


def test_scales_that_are_inputs_stay_as_the_model_has_them() -> None:
    x, s = any_bytes(_RANDOM, (3, 10), "uint8"), np.asarray(0.0313, "f4")

    def build(v: relax.Expr, scale: relax.Expr) -> relax.Expr:
        y = relax.op.matmul(
            relax.op.dequantize(v, scale, const(117, "uint8"), axis=0), _Graph().dq(M, 0.002, 0, "int8")
        )
        return relax.op.quantize(y, scale, const(120, "uint8"), axis=0, out_dtype="uint8")

    (got,) = run_here(build, {"x": x, "s": s}, device("host")).outputs
    o = _Numbers()
    assert np.array_equal(
        got, o.q(o.dq(x, s, 117, "uint8") @ o.dq(M, 0.002, 0, "int8"), float(s), 120, "uint8")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "rpi5", "rpi4"])
def test_a_convolution_whose_zero_point_is_computed(name: str) -> None:
    # As quantize_dynamic writes it: the result is quantised again, with the scale and zero point of the run.
    x, zero = images(), np.asarray(77, "u1")
    inside = np.pad(np.ones((6, 7), np.bool_), ((1, 0), (2, 1)))[None, None]
    scale = np.asarray(0.5, "f4")

    def build(v: relax.Expr, point: relax.Expr, step: relax.Expr) -> relax.Expr:
        padded = relax.op.where(
            relax.const(inside), relax.op.nn.pad(v, [0, 0, 0, 0, 1, 0, 2, 1], pad_value=0), point
        )
        sums = relax.op.nn.conv2d(padded, relax.const(W), out_dtype="int32")
        moved = relax.op.multiply(relax.op.astype(point, "int32"), const(TOTAL, "int32"))
        y = relax.op.multiply(relax.op.astype(relax.op.subtract(sums, moved), "float32"), step)
        again = relax.op.divide(relax.op.max(y), const(255, "float32"))
        return relax.Tuple([y, relax.op.quantize(y, again, point, axis=0, out_dtype="uint8")])

    result = run_here(build, {"x": x, "zero": zero, "scale": scale}, device(name))
    exact = conv2d(x.astype("f8") - 77, W.astype("f8"), padding=(1, 2, 0, 1)) / 2
    assert np.array_equal(result.outputs[0], exact)
    again = exact.astype("f4") / (exact.astype("f4").max() / np.float32(255))
    assert np.abs(result.outputs[1] - np.clip(again + 77, 0, 255)).max() <= 0.5 + 1e-3
    assert integer_convolution.KIND in result.schedules


def test_a_scale_of_zero_is_no_traceback() -> None:
    x = images()
    lower_for(
        lambda v: _Graph().q(relax.op.nn.relu(conv(_Graph(), v)), 0.0, 3, "uint8"), {"x": x}, device("host")
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["host", "rpi4"])
def test_a_mean_reads_bytes(name: str) -> None:
    result = both(averaged, images(), name)
    assert any("integer_avg_pool2d" in var.name_hint for var in result.lowered.kernels.functions)
