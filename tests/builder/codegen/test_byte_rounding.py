"""Rounding to bytes on 64-bit ARM: its instructions, and the bytes of the formula that they replace."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx

from builder.codegen.byte_rounding import write_byte_rounding
from builder.codegen.lowering import build_kernels
from builder.kernels.spaces.quantisation import ROUNDER
from tests.builder.codegen.vector_values import value_of
from tests.builder.kernels.integer_machines import const, device, lower_for, numbers

LANES: Final = 16
INFINITY: Final = float("inf")
# Ties, both sides of each limit, what does not fit 16 or 32 bits, infinities, both zeros.
EDGES: Final = np.array(
    [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 128.5, 254.5, 255.5, 256.5, -127.5, -128.5, -129.5, 0.0,
     -0.0, 0.49999997, -0.49999997, 32766.5, 32767.5, 32768.5, -32767.5, -32768.5, -32769.5, 2147483648.0,
     -2147483648.0, 3e9, -3e9, 3.4e38, INFINITY, -INFINITY]
).astype("f4")  # fmt: skip
NUMBERS: Final = np.concatenate(
    [EDGES, np.random.default_rng(1).normal(0, 150, 4096 - len(EDGES)).astype("f4")]
)


def formula(point: tirx.Expr, kind: str, *, is_even: bool) -> tuple[tirx.Buffer, tirx.Expr]:
    """Return the buffer of numbers, and the expression that `quantisation` makes, as vectors."""
    info = np.iinfo(kind)
    source = tirx.decl_buffer((LANES,), "float32", "x")
    x = tirx.BufferLoad(source, [tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), LANES)])
    wide = lambda e: tirx.Broadcast(e, LANES)  # noqa: E731
    offset = tirx.Cast("int32", point)
    low, high = (tirx.Cast("float32", tirx.const(int(end), "int32") - offset) for end in (info.min, info.max))
    limited = tirx.Max(tirx.Min(x, wide(high)), wide(low))
    rounder = tirx.const(ROUNDER, "float32")
    if is_even:
        total = limited + wide(tirx.Add(rounder, tirx.Cast("float32", offset)))
        return source, tirx.Cast(f"{kind}x{LANES}", tirx.reinterpret(f"int32x{LANES}", total))
    whole = tirx.reinterpret(f"int32x{LANES}", limited + wide(rounder))
    return source, tirx.Cast(f"{kind}x{LANES}", whole + wide(offset))


@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize(
    ("kind", "zero"), [(k, z) for k, ends in (("int8", (-128, 127)), ("uint8", (0, 255))) for z in (*ends, 3)]
)
def test_bytes_are_those_of_the_formula(kind: str, zero: int, as_floats: bool) -> None:
    point = tirx.Var("point", kind)
    for is_even in (False, True) if zero % 2 == 0 else (False,):
        source, expr = formula(point, kind, is_even=is_even)
        value = tirx.Cast(f"float32x{LANES}", expr) if as_floats else expr
        target = tirx.decl_buffer((LANES,), str(value.ty.dtype).partition("x")[0], "y")
        place = [tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), LANES)]
        func = tirx.PrimFunc([source, target, point], tirx.BufferStore(target, value, place))
        mod = write_byte_rounding(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), "aarch64")
        stores: list[tirx.BufferStore] = []
        tvm_ffi.structural_walk(mod["main"].body, (tirx.BufferStore, stores.append))
        [store] = stores
        assert not isinstance(store.value, tirx.Cast)
        for start in range(0, len(NUMBERS), LANES):
            part = NUMBERS[start : start + LANES]
            known = {"x": part, "point": np.asarray(zero, kind)}
            assert np.array_equal(value_of(store.value, known), value_of(value, known)), part


@pytest.mark.parametrize("whole", [False, True])
def test_limits_of_an_activation_stay(whole: bool) -> None:
    source, expr = formula(tirx.Var("point", "int8"), "int8", is_even=False)
    most = tirx.Cast("float32", tirx.Var("most", "int32")) if whole else tirx.const(6.0, "float32")

    def narrower(limit: tirx.Min) -> tirx.Expr:
        return tirx.Min(limit.a, tirx.Broadcast(most, LANES))

    limited = tvm_ffi.structural_map(expr, (tirx.Min, narrower))
    target = tirx.decl_buffer((LANES,), "int8", "y")
    place = [tirx.Ramp(tirx.const(0, "int32"), tirx.const(1, "int32"), LANES)]
    store = tirx.BufferStore(target, limited, place)
    mod = tvm.IRModule({"main": tirx.PrimFunc([source, target], store).with_attr("global_symbol", "main")})
    assert write_byte_rounding(mod, "aarch64")["main"].body.value.same_as(limited)


@pytest.mark.parametrize(
    ("name", "words", "others"),
    [
        ("rpi5", ("fcvtns", "sqxtn"), ("fcmgt",)),
        ("rpi4", ("fcvtns", "sqxtn"), ("fcmgt",)),
        ("rpi-armv7", (), ("fcvtns",)),
    ],
)
def test_instructions_of_an_epilogue(name: str, words: tuple[str, ...], others: tuple[str, ...]) -> None:
    w = np.ones((16, 16, 1, 1), "i1")

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(numbers(v, 0, "int8"), numbers(relax.const(w), 0, "int8"))
        return relax.op.quantize(y, const(0.5, "float32"), const(3, "int8"), axis=0, out_dtype="int8")

    target = device(name)
    lowered = lower_for(build, {"x": np.zeros((1, 16, 4, 8), "i1")}, target)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    kernel = next(part for part in assembly.split(".globl") if "scvtf" in part or not words)
    found = set(kernel.split())
    assert found >= set(words)
    assert found.isdisjoint(others), found.intersection(others)
