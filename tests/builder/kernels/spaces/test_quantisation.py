"""QuantizeLinear and DequantizeLinear, against ONNX's definition."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from tests.builder.kernels.integer_machines import const, device, lower_for, run_here

HALVES = np.arange(-300, 300, dtype="f4") + np.float32(0.5)
LARGE = np.array([np.inf, -np.inf, 3e38, -3e38, 2**23, -(2**23), 2**31, 1e-45, -0.0, 127.49999, -128.5], "f4")


def onnx_quantize(x: np.ndarray, scale: float, zero: int, dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    with np.errstate(over="ignore"):
        rounded = np.rint(x / np.float32(scale)).astype("f8") + zero
    return np.clip(rounded, info.min, info.max).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_quantisation_rounds_to_even_before_it_adds_the_zero_point(dtype: str) -> None:
    info = np.iinfo(dtype)
    noise = np.random.default_rng(2).standard_normal(517).astype("f4") * 60
    x = np.concatenate([HALVES, HALVES * np.float32(0.25), LARGE, noise])
    points = [(scale, zero) for scale in (1.0, 0.25, 0.1) for zero in (info.min, info.max, 3, 4)]

    def build(v: relax.Expr) -> relax.Expr:
        return relax.Tuple(
            [
                relax.op.quantize(v, const(scale, "float32"), const(zero, dtype), axis=0, out_dtype=dtype)
                for scale, zero in points
            ]
        )

    for got, (scale, zero) in zip(run_here(build, {"x": x}, device("host")).outputs, points, strict=True):
        assert np.array_equal(got, onnx_quantize(x, scale, zero, dtype)), (scale, zero)


@pytest.mark.parametrize("is_constant", [True, False])
def test_a_quotient_is_rounded_as_a_division_rounds_it(is_constant: bool) -> None:
    # Pictures are often halfway between two steps, all of them.
    halves = np.arange(-150, 300, dtype="f8") + 0.5
    for scale in (0.1, 2 / 255, 1 / 127.5, 0.0187, 3.7e-20, 7.3e12, 2.9):
        near = (halves * np.float32(scale)).astype("f4")
        x = np.concatenate([near, *(np.nextafter(near, np.float32(end)) for end in (-1e30, 1e30)), LARGE])

        def build(v: relax.Expr, s: relax.Expr, scale: float = scale) -> relax.Expr:
            step = const(scale, "float32") if is_constant else s
            return relax.op.quantize(v, step, const(127, "uint8"), axis=0, out_dtype="uint8")

        (got,) = run_here(build, {"x": x, "s": np.asarray(scale, "f4")}, device("host")).outputs
        assert np.array_equal(got, onnx_quantize(x, scale, 127, "uint8")), scale


@pytest.mark.parametrize("scale", [0.0, -0.1, 1e-42])
def test_scales_of_a_run_that_are_unusual(scale: float) -> None:
    x = np.linspace(-3, 3, 77, dtype="f4") * np.float32(abs(scale) or 0)

    def build(v: relax.Expr, s: relax.Expr) -> relax.Expr:
        return relax.op.quantize(v, s, const(10, "uint8"), axis=0, out_dtype="uint8")

    (got,) = run_here(build, {"x": x, "s": np.asarray(scale, "f4")}, device("host")).outputs
    expected = onnx_quantize(x, scale, 10, "uint8") if scale < 0 else np.full(77, 10)
    assert np.array_equal(got, expected)


def test_what_is_no_number_becomes_some_byte() -> None:
    x = np.full(33, np.nan, "f4")
    build = lambda v: relax.op.quantize(  # noqa: E731
        v, const(0.5, "float32"), const(3, "uint8"), axis=0, out_dtype="uint8"
    )
    assert len(set(run_here(build, {"x": x}, device("host")).outputs[0])) == 1


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16"])
def test_dequantisation_is_a_difference_times_the_scale(dtype: str) -> None:
    info = np.iinfo(dtype)
    x = np.unique(np.linspace(info.min, info.max, 1003).astype("i8")).astype(dtype)
    zeros = (info.min, info.max, 5)

    def build(v: relax.Expr) -> relax.Expr:
        return relax.Tuple(
            [relax.op.dequantize(v, const(0.1, "float32"), const(zero, dtype), axis=0) for zero in zeros]
        )

    for got, zero in zip(run_here(build, {"x": x}, device("host")).outputs, zeros, strict=True):
        assert np.array_equal(got, (x.astype("i8") - zero).astype("f4") * np.float32(0.1))


VECTOR = {
    "rpi4": r"\tfml[as]\tv\d+\.4s",
    "rpi-armv7": r"\tvfm[as]\.f32\tq",
    "cascadelake": r"\tvfn?m(add|sub)\d+ps\t.*zmm",
    "x86-64-v2": r"\tdivps\t",
}


@pytest.mark.parametrize("name", VECTOR)
def test_quantisation_is_written_with_vectors(name: str) -> None:
    target = device(name)
    lowered = lower_for(
        lambda v: relax.op.quantize(v, const(0.1, "float32"), const(3, "uint8"), axis=0, out_dtype="uint8"),
        {"x": np.zeros(512, "f4")},
        target,
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert re.search(VECTOR[name], assembly)
    assert not re.search(r"nearbyint|roundeven|\brintf?\b|lround|\bfmaf?\b", assembly)
    assert name == "x86-64-v2" or not re.search(r"\t(fdiv|vdiv)", assembly)
