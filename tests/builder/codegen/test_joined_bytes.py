"""Stores of 16 bytes that are joined on AVX-512: the bytes of the formula, and where it happens."""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.ir import TensorLoad

from builder.codegen.joined_bytes import join_byte_stores
from builder.codegen.lowering import build_kernels
from builder.kernels.spaces.quantisation import ROUNDER
from builder.target.device_target import resolve
from tests.builder.codegen.vector_values import value_of
from tests.builder.kernels.integer_machines import const, device, lower_for, numbers, run_here
from tests.builder.kernels.machines import Build

LANES: Final = 16
FEATURES: Final = frozenset({"avx512bw"})
INFINITY: Final = float("inf")
# Ties, both sides of each limit, what does not fit 16 or 32 bits, infinities, NaN, both zeros.
EDGES: Final = np.array(
    [0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 128.5, 254.5, 255.5, 256.5, -127.5, -128.5, -129.5, 0.0,
     -0.0, 0.49999997, -0.49999997, 32766.5, 32767.5, 32768.5, -32767.5, -32768.5, -32769.5, 2147483648.0,
     -2147483648.0, 3e9, -3e9, 3.4e38, INFINITY, -INFINITY, float("nan")]
).astype("f4")  # fmt: skip


def vectors(start: tirx.Expr) -> tirx.Ramp:
    return tirx.Ramp(start, tirx.const(1, "int32"), LANES)


def stores_of(stmt: tirx.Stmt) -> list[tirx.BufferStore]:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(stmt, (tirx.BufferStore, found.append))
    return found


def loop(
    kind: str, zero: int, count: int, *, is_even: bool, step: int = LANES, way: int = tirx.ForKind.UNROLLED
) -> tirx.PrimFunc:
    """Return the function that rounds `count` vectors to bytes as `quantisation` says."""
    info = np.iinfo(kind)
    source = tirx.decl_buffer((count * LANES,), "float32", "x")
    target = tirx.decl_buffer((count * max(step, LANES),), kind, "y")
    var = tirx.Var("column", "int32")
    wide = lambda e: tirx.Broadcast(e, LANES)  # noqa: E731
    offset = tirx.const(zero, "int32")
    low, high = (tirx.Cast("float32", tirx.const(int(end), "int32") - offset) for end in (info.min, info.max))
    x = tirx.BufferLoad(source, [vectors(var * LANES)])
    limited = tirx.Max(tirx.Min(x, wide(high)), wide(low))
    rounder = tirx.const(ROUNDER, "float32")
    if is_even:
        total = limited + wide(tirx.Add(rounder, tirx.Cast("float32", offset)))
        value = tirx.Cast(f"{kind}x{LANES}", tirx.reinterpret(f"int32x{LANES}", total))
    else:
        whole = tirx.reinterpret(f"int32x{LANES}", limited + wide(rounder))
        value = tirx.Cast(f"{kind}x{LANES}", whole + wide(offset))
    body = tirx.BufferStore(target, value, [vectors(var * step)])
    func = tirx.PrimFunc([source, target], tirx.For(var, 0, count, way, body))
    return func.with_attr({"global_symbol": "main", "tirx.noalias": True})


def bytes_of(numbers_: np.ndarray, kind: str, zero: int) -> np.ndarray:
    info = np.iinfo(kind)
    high = np.float32(int(info.max) - zero)
    known = np.where(numbers_ < high, numbers_, high).astype("f8")
    return (np.rint(np.clip(known, int(info.min) - zero, None)) + zero).astype(kind)


def result_of(func: tirx.PrimFunc, x: np.ndarray, size: int, kind: str) -> tuple[np.ndarray, list[int]]:
    """Return what the joined stores of `func` write, and the bytes in each store."""
    mod = join_byte_stores(tvm.IRModule({"main": func}), FEATURES)
    out, lanes = np.zeros(size, kind), []
    for store in stores_of(mod["main"].body):
        value = value_of(store.value, {"x": x})
        out[value_of(store.indices[0], {})] = value
        lanes.append(len(value))
    return out, lanes


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9])
@pytest.mark.parametrize(
    ("kind", "zero"), [(k, z) for k, ends in (("int8", (-128, 127)), ("uint8", (0, 255))) for z in (*ends, 3)]
)
def test_bytes_are_those_of_the_formula(kind: str, zero: int, count: int) -> None:
    random = np.random.default_rng(1)
    size = count * LANES
    for is_even in (False, True) if zero % 2 == 0 else (False,):
        func = loop(kind, zero, count, is_even=is_even)
        for _ in range(5):
            x = random.permutation(np.resize(EDGES, size))
            x = np.where(random.random(size) < 0.3, random.normal(0, 150, size), x).astype("f4")
            out, lanes = result_of(func, x, size, kind)
            assert np.array_equal(out, bytes_of(x, kind, zero))
            assert lanes == [64] * (count // 4) + [LANES * (count % 4)] * (count % 4 > 0)


@pytest.mark.parametrize("zero", [0, 3, 128])
def test_this_machine_computes_the_same(zero: int) -> None:
    """With AVX512BW by joined stores, on other machines by one store for each vector."""
    target = device("host").tvm_target
    func = loop("uint8", zero, 7, is_even=zero % 2 == 0)
    kernel = build_kernels(tvm.IRModule({"main": func}), target)["main"]
    x = np.resize(EDGES, 7 * LANES)
    out = tvm.runtime.tensor(np.zeros(7 * LANES, "uint8"))
    kernel(tvm.runtime.tensor(x), out)
    assert np.array_equal(out.numpy(), bytes_of(x, "uint8", zero))


@pytest.mark.parametrize(
    ("changes", "features"),
    [({"step": 32}, FEATURES), ({"way": tirx.ForKind.SERIAL}, FEATURES), ({}, frozenset({"avx2"}))],
)
def test_other_stores_stay(changes: dict[str, Any], features: frozenset[str]) -> None:
    mod = tvm.IRModule({"main": loop("uint8", 3, 4, is_even=False, **changes)})
    assert tvm_ffi.structural_equal(join_byte_stores(mod, features), mod)


def _tabled(table: np.ndarray, w: np.ndarray, *, looks_up: bool) -> Build:
    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.conv2d(numbers(v, 0, "uint8"), numbers(relax.const(w), 0, "int8", 0.01))
        y = relax.op.quantize(y, const(0.5, "float32"), const(3, "uint8"), axis=0, out_dtype="uint8")
        return relax.op.take(relax.const(table), y) if looks_up else y

    return build


@pytest.mark.parametrize(("cpu", "looks_up"), [("icelake-server", True), ("cascadelake", False)])
def test_a_tile_stores_whole_vectors(cpu: str, looks_up: bool) -> None:
    target = resolve(f"llvm -mtriple=x86_64-linux-gnu -mcpu={cpu}")
    build = _tabled(np.arange(256, dtype="u1"), np.ones((16, 16, 1, 1), "i1"), looks_up=looks_up)
    lowered = lower_for(build, {"x": np.zeros((1, 16, 4, 8), "u1")}, target)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    [kernel] = [part for part in assembly.split(".globl") if "vpdpbusd" in part]
    assert "vpackuswb" in kernel
    assert "vpmovdb" not in kernel
    # A table has four vectors, and one look-up of two instructions serves 64 bytes.
    assert len(re.findall("vperm[it]2b", kernel)) == (2 * kernel.count("vpackuswb") if looks_up else 0)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 14])
def test_rows_of_any_width_have_the_bytes_of_the_formula(width: int) -> None:
    random = np.random.default_rng(2)
    table = random.integers(0, 256, 256).astype("u1")
    w = random.integers(-127, 128, (40, 20, 1, 1)).astype("i1")
    x = random.integers(0, 256, (1, 20, 3, width)).astype("u1")
    sums = np.einsum("oi,nihw->nohw", w[:, :, 0, 0].astype("i8"), x.astype("i8"))
    whole = np.rint(sums.astype("f4") * (np.float32(0.01) / np.float32(0.5)))
    expected = np.clip(whole + 3, 0, 255).astype("u1")
    for looks_up in (False, True):
        got = run_here(_tabled(table, w, looks_up=looks_up), {"x": x}, device("host")).outputs[0]
        assert np.array_equal(got, table[expected] if looks_up else expected)


def test_a_round_that_reads_what_is_stored_stays() -> None:
    func = loop("uint8", 3, 4, is_even=False)
    target, column = func.body.body.buffer, func.body.loop_var
    own = tirx.Cast(f"float32x{LANES}", tirx.BufferLoad(target, [vectors(column * LANES)]))
    reads = tvm_ffi.structural_map(func.body, (TensorLoad, lambda load: load + own))
    mod = tvm.IRModule({"main": func.with_body(reads)})
    assert tvm_ffi.structural_equal(join_byte_stores(mod, FEATURES), mod)
