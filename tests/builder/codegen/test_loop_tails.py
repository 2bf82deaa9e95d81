"""Loops whose last tile is incomplete, and the same numbers as before."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir, te, tirx
from tvm.ir import Call

from builder.codegen.lowering import build_kernels, to_loops
from builder.target.device_target import resolve

TARGET = resolve("host").tvm_target


def product(rows: int, columns: int, depth: int) -> tirx.PrimFunc:
    a, b = te.placeholder((rows, depth), name="a"), te.placeholder((depth, columns), name="b")
    k = te.reduce_axis((0, depth), "k")
    c = te.compute((rows, columns), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")
    return te.create_prim_func([a, b, c]).with_attr("global_symbol", "main")


def tiled(func: tirx.PrimFunc, tile: tuple[int, int, int, int], *, fused: bool) -> tvm.IRModule:
    """Order the loops of a product, with a tile of rows, vectors, lanes and steps of the reduction."""
    rows, vectors, lanes, steps = tile
    sch = s_tir.Schedule(func)
    block = sch.get_sblock("c")
    out = sch.cache_write(block, 0, "global")
    i, j, k = sch.get_loops(block)
    io, ii = sch.split(i, [None, rows])
    jo, jt, ji = sch.split(j, [None, vectors, lanes])
    ko, ki = sch.split(k, [None, steps])
    sch.reorder(io, jo, ko, ki, ii, jt, ji)
    sch.reverse_compute_at(out, jo, preserve_unit_loops=True)
    sch.parallel(sch.fuse(io, jo) if fused else io)
    sch.vectorize(ji)
    sch.vectorize(sch.get_loops(out)[-1])
    for loop in (jt, ii, ki):
        sch.unroll(loop)
    sch.decompose_reduction(block, ko)
    return sch.mod


def conditions(mod: tvm.IRModule) -> list[str]:
    """Return the conditions inside the innermost loops of `mod`."""
    found: list[str] = []

    def loop(stmt: tirx.For) -> None:
        if stmt.kind in (tirx.ForKind.VECTORIZED, tirx.ForKind.UNROLLED):
            tvm_ffi.structural_walk(stmt.body, (tirx.IfThenElse, lambda s: found.append(str(s.condition))))

    for func in mod.functions.values():
        tvm_ffi.structural_walk(func.body, (tirx.For, loop))
    return found


@settings(max_examples=25, deadline=None)
@given(
    extents=st.tuples(*[st.integers(1, 70)] * 3),
    tile=st.tuples(st.integers(1, 6), st.integers(1, 3), st.sampled_from([2, 4, 8]), st.integers(1, 4)),
    fused=st.booleans(),
)
@pytest.mark.slow
def test_any_tile_of_a_product(
    extents: tuple[int, int, int], tile: tuple[int, int, int, int], fused: bool
) -> None:
    rows, columns, depth = extents
    mod = tiled(product(rows, columns, depth), tile, fused=fused)
    assert not conditions(to_loops(mod))
    state = np.random.RandomState(1)
    a, b = state.randn(rows, depth).astype("f4"), state.randn(depth, columns).astype("f4")
    c = np.full((rows, columns), np.nan, "f4")
    tensors = [tvm.runtime.tensor(x) for x in (a, b, c)]
    build_kernels(mod, TARGET)["main"](*tensors)
    assert np.allclose(tensors[2].numpy(), a.astype("f8") @ b, atol=1e-3)


def test_the_incomplete_tile_of_parallel_loops_is_a_branch() -> None:
    loops = to_loops(tiled(product(10, 37, 8), (4, 2, 8, 2), fused=True))
    outer = loops["main"].body
    while not isinstance(outer, tirx.For):
        outer = next(part for part in reversed(list(outer.seq)))
    assert outer.kind == tirx.ForKind.PARALLEL
    assert isinstance(outer.body, tirx.IfThenElse), "still one loop, which chooses between copies of its body"


def test_a_conditional_value_is_split_too() -> None:
    x = te.placeholder((37,), name="x")
    k = te.reduce_axis((0, 48), "k")
    value = tirx.if_then_else(tirx.likely(k < 37), x[k], tirx.const(0.0, "float32"))
    y = te.compute((1,), lambda _: te.sum(value, axis=k), name="y")
    sch = s_tir.Schedule(te.create_prim_func([x, y]).with_attr("global_symbol", "main"))
    _, lane = sch.split(sch.get_loops(sch.get_sblock("y"))[-1], [None, 8])
    sch.rfactor(lane, 1)
    found: list[Call] = []
    tvm_ffi.structural_walk(to_loops(sch.mod)["main"].body, (Call, found.append))
    assert not [c for c in found if c.op.name == "prim.if_then_else"]
    numbers = np.arange(37, dtype="f4")
    out = tvm.runtime.tensor(np.zeros(1, "f4"))
    build_kernels(sch.mod, TARGET)["main"](tvm.runtime.tensor(numbers), out)
    assert out.numpy()[0] == numbers.sum()


def test_a_condition_that_is_no_bound_of_a_tile_stays() -> None:
    x = te.placeholder((40,), name="x")
    zero = tirx.const(0.0, "float32")
    y = te.compute((40,), lambda i: tirx.if_then_else(i % 3 == 1, x[i], zero), name="y")
    mod = tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})
    out = tvm.runtime.tensor(np.full(40, np.nan, "f4"))
    build_kernels(mod, TARGET)["main"](tvm.runtime.tensor(np.arange(40, dtype="f4")), out)
    assert np.array_equal(out.numpy(), np.where(np.arange(40) % 3 == 1, np.arange(40), 0))
