"""Winograd's convolution of small integers, against exact integers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.kernels.decisions import heuristic
from builder.kernels.spaces import integer_convolution, integer_winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.winograd_transforms import Transforms
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.integer_machines import (
    RandomChooser,
    any_bytes,
    const,
    device,
    lower_for,
    numbers,
    run_here,
)
from tests.builder.kernels.machines import Result, conv2d

# Devices that multiply 16-bit integers: one by one, or in pairs.
DEVICES = ("rpi4", "rpi-armv7", "riscv64", "x86-64-v2", "x86-64-v3", "skylake-avx512")
SAME = (1, 1, 1, 1)


def convolve(
    x: np.ndarray,
    w: np.ndarray,
    zero: int,
    target: DeviceTarget,
    padding: tuple[int, int, int, int] = SAME,
    choose: Any = heuristic,
) -> Result:
    """Convolve as numbers with scales of 1, and compare with the sums of integers."""
    kind = str(x.dtype)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.conv2d(numbers(v, zero, kind), numbers(relax.const(w), 0, "int8"), padding=padding)

    result = run_here(build, {"x": x}, target, choose)
    wanted = conv2d(x.astype("i8") - zero, w, padding=padding)
    assert np.array_equal(result.outputs[0].astype("i8"), wanted.astype("i8"))
    return result


# m, input, output channels, dtype, zero point, padding. Zero points are at both ends of the type and inside.
CASES = [
    (4, (1, 32, 9, 11), 24, "uint8", 0, SAME),
    (2, (2, 19, 8, 8), 40, "int8", -128, (0, 1, 2, 0)),
    (4, (3, 8, 4, 7), 9, "uint8", 255, (1, 0, 0, 2)),
    (2, (1, 24, 5, 3), 16, "int8", 127, SAME),
    (4, (1, 17, 13, 6), 33, "int8", 5, (2, 2, 2, 2)),
    (2, (1, 40, 3, 3), 8, "uint8", 131, (0, 0, 0, 0)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), list(zip(DEVICES, CASES, strict=True)))
def test_sums_are_exact(name: str, case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    m, shape, outputs, kind, zero, padding = case
    monkeypatch.setattr(integer_winograd, "output_tile", lambda *_: m)
    random = np.random.default_rng(3)
    x, w = any_bytes(random, shape, kind), any_bytes(random, (outputs, shape[1], 3, 3), "int8")
    assert integer_winograd.KIND in convolve(x, w, zero, device(name), padding).schedules


@pytest.mark.slow
def test_every_point_of_the_space_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_winograd, "output_tile", lambda *_: 4)
    random, chooser = np.random.default_rng(5), RandomChooser(5)
    x, w = any_bytes(random, (1, 20, 7, 9), "uint8"), any_bytes(random, (44, 20, 3, 3), "int8")
    convolve(x, w, 9, device("rpi4"), SAME, chooser)
    assert set(chooser.made) >= {"tiles", "oc", "iq"}


@pytest.mark.slow
def test_a_layer_whose_sums_are_too_large_is_computed_directly() -> None:
    target, worst = device("x86-64-v3"), np.full((8, 128, 3, 3), 127, "int8")
    x = np.full((1, 128, 8, 8), 255, "uint8")
    schedules = convolve(x, worst, 0, target).schedules
    assert integer_convolution.KIND in schedules
    assert integer_winograd.KIND not in schedules


@pytest.mark.slow
def test_llvm_is_not_told_that_multiples_of_the_sums_fit() -> None:
    """Such a promise (nsw) would make them undefined."""
    target, w = device("x86-64-v3"), any_bytes(np.random.default_rng(1), (32, 32, 3, 3), "int8")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(numbers(v, 3, "uint8"), numbers(relax.const(w), 0, "int8"), padding=SAME)
        return relax.op.quantize(y, const(0.05, "float32"), const(0, "uint8"), axis=0, out_dtype="uint8")

    kernels = lower_for(build, {"x": np.zeros((1, 32, 12, 12), "uint8")}, target).kernels
    code = build_kernels(kernels, target.tvm_target).inspect_source("ll")
    assert re.search(r"= mul <8 x i32> .*954437177", code), "9 * 954437177 = 1 modulo 2^32"
    assert not re.search(r"= (mul|sub) nsw <8 x i32>", code)
    assert "<8 x i64>" not in code, "LLVM computes with 32 bits"


@pytest.mark.parametrize("m", [2, 4])
def test_whole_transforms_give_a_multiple(m: int) -> None:
    t = Transforms.of(m).whole()
    state = np.random.RandomState(m)
    g, d = state.randint(-9, 9, 3), state.randint(-9, 9, m + 2)
    for rows in (t.input, t.weights, t.output):
        assert all(value == int(value) for row in rows for value in row)
    product = (np.asarray(t.weights, object) @ g) * (np.asarray(t.input, object) @ d)
    wanted = [sum(int(g[k]) * int(d[i + k]) for k in range(3)) for i in range(m)]
    assert list(np.asarray(t.output, object) @ product) == [Fraction(t.divisor * y) for y in wanted]
    assert (t.divisor**2 >> t.shift) * t.inverse % 2**32 == 1


def in_32_bits(x: np.ndarray, w: np.ndarray, m: int) -> tuple[np.ndarray, int, int]:
    """Return one tile as the kernel computes it, and the largest transformed value and sum.

    `x` is `[IC, m + 2, m + 2]`, `w` is `[OC, IC, 3, 3]`.
    """
    t = Transforms.of(m).whole()
    b, g, a = (np.asarray(rows, np.int64) for rows in (t.input, t.weights, t.output))
    data, factors = np.einsum("ea,fb,iab->ief", b, b, x), np.einsum("ea,fb,oiab->oief", g, g, w)
    sums = np.einsum("ief,oief->oef", data, factors)
    wrapped = (np.einsum("re,sf,oef->ors", a, a, sums) * t.inverse).astype(np.int32)
    return wrapped >> t.shift, int(max(np.abs(data).max(), np.abs(factors).max())), int(np.abs(sums).max())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([2, 4]),
    st.sampled_from(["uint8", "int8"]),
    st.integers(1, 700),
    st.floats(0.0, 1.0),
    st.integers(0, 2**32 - 1),
)
def test_no_input_breaks_what_is_called_exact(m: int, kind: str, depth: int, bias: float, seed: int) -> None:
    """Weights of one sign are the worst, and each output gets the input that makes it largest."""
    random, info = np.random.default_rng(seed), np.iinfo(kind)
    size = random.integers(1, 129)
    w = np.where(random.random((1, depth, 3, 3)) < bias, -size, size - 1).astype(np.int64)
    x = random.choice([info.min, info.max], (depth, m + 2, m + 2)).astype(np.int64)
    y, z = random.integers(0, m, 2)
    extremes = [info.max, info.min] if random.random() < 0.5 else [info.min, info.max]
    x[:, y : y + 3, z : z + 3] = np.where(w[0] > 0, *extremes)
    got, widest, largest = in_32_bits(x, w, m)
    wanted = conv2d(x[None], w).astype(np.int64)[0]
    if integer_winograd.is_exact(w.astype("int8"), kind, m):
        assert widest < 1 << 15
        assert largest < 1 << 31
        assert np.array_equal(got, wanted)
    elif not np.array_equal(got, wanted):
        return  # refused for good reason


def test_a_sum_that_would_be_wrong_is_refused() -> None:
    w = np.full((1, 130, 3, 3), 127, "int8")
    x = np.full((130, 6, 6), 255, np.int64)
    assert not integer_winograd.is_exact(w, "uint8", 4)
    got, _, _ = in_32_bits(x, w.astype(np.int64), 4)
    assert not np.array_equal(got, conv2d(x[None], w).astype(np.int64)[0])


def geometry(channels: int, extent: int, **how: Any) -> Conv2d:
    fields: dict[str, Any] = {"kernel": (3, 3), "strides": (1, 1), "dilation": (1, 1), "groups": 1, **how}
    return Conv2d(1, channels, extent, extent, channels, padding=SAME, **fields)


@pytest.mark.parametrize(
    ("name", "op", "pays"),
    [
        ("x86-64-v3", geometry(64, 56), True),
        ("rpi4", geometry(128, 28), True),
        ("rpi5", geometry(64, 56), False),
        ("cascadelake", geometry(64, 56), False),
        ("x86-64-v3", geometry(64, 56, strides=(2, 2)), False),
        ("x86-64-v3", geometry(64, 56, dilation=(2, 2)), False),
        ("x86-64-v3", geometry(64, 1), False),
    ],
)
def test_where_it_pays(name: str, op: Conv2d, pays: bool) -> None:
    w = any_bytes(np.random.default_rng(0), (op.out_channels, op.in_channels, 3, 3), "int8") // 4
    assert (integer_winograd.output_tile(op, w, "uint8", device(name)) is not None) == pays
