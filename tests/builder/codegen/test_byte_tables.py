"""Tables of 256 bytes: one instruction where the processor has it, and the same bytes everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.target.device_target import resolve
from tests.builder.kernels.integer_machines import const, device, lower_for, numbers, run_here

TABLE = np.random.default_rng(4).integers(0, 256, 256).astype("u1")


@pytest.mark.parametrize("shape", [(256,), (3, 64), (5, 7, 16), (2, 31), (1, 9, 3, 3)])
def test_each_byte_is_that_of_the_table(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(5).permutation(np.resize(np.arange(256), shape).ravel()).reshape(shape)
    x = x.astype("u1")
    build = lambda v: relax.op.take(relax.const(TABLE), v)  # noqa: E731
    assert np.array_equal(run_here(build, {"x": x}, device("host")).outputs[0], TABLE[x])


@pytest.mark.parametrize(("cpu", "uses_it"), [("icelake-server", True), ("cascadelake", False)])
def test_the_instruction_is_used_where_the_processor_has_it(cpu: str, uses_it: bool) -> None:
    target = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    assert target.looks_up_bytes is uses_it
    lowered = lower_for(
        lambda v: relax.op.take(relax.const(TABLE), v), {"x": np.zeros((4, 64), "u1")}, target
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert ("\tvpermi2b\t" in assembly or "\tvpermt2b\t" in assembly) is uses_it


def _of_integers(v: relax.Expr) -> relax.Expr:
    return relax.op.take(relax.const(TABLE), relax.op.astype(v, "uint8"))


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 16), (70,)])
def test_the_lowest_bytes_of_integers_are_looked_up(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(6).integers(-(2**31), 2**31, shape).astype("i4")
    assert np.array_equal(run_here(_of_integers, {"x": x}, device("host")).outputs[0], TABLE[x & 255])


def test_bytes_of_integers_are_not_spread_over_a_vector() -> None:
    """A convolution's epilogue has 16 integers at a time."""
    target, w = resolve("llvm -mtriple=x86_64-linux-gnu -mcpu=icelake-server"), np.ones((16, 16, 1, 1), "i1")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(numbers(v, 0, "uint8"), numbers(relax.const(w), 0, "int8"))
        y = relax.op.quantize(y, const(0.5, "float32"), const(3, "uint8"), axis=0, out_dtype="uint8")
        return relax.op.take(relax.const(TABLE), y)

    lowered = lower_for(build, {"x": np.zeros((1, 16, 4, 8), "u1")}, target)
    assert any("look_up" in var.name_hint for var in lowered.kernels.functions)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    [kernel] = [part for part in assembly.split(".globl") if "vpdpbusd" in part]
    assert "vpermt2b" in kernel or "vpermi2b" in kernel
    assert "vinserti" not in kernel
