"""Marked products, written with the instructions of AMX or left as loops."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.tirx import transform

from builder.codegen.lowering import build_kernels, to_loops
from builder.codegen.tile_products import write_tile_products
from builder.errors import BuildError
from builder.kernels.spaces.tile_loops import SUMS_MARK, TILE_MARK, ZEROS_MARK
from tests.builder.kernels.integer_machines import device, lower_for, numbers

_TILES: Final = device("sapphirerapids")


def kernels_of(shape: tuple[int, ...], weights: tuple[int, ...], **how: Any) -> tvm.IRModule:
    """Return the scheduled kernels of a product of bytes."""
    w = relax.const(np.ones(weights, "i1"))

    def build(v: relax.Expr) -> relax.Expr:
        left, right = numbers(v, 3, "uint8"), numbers(w, 0, "int8")
        return relax.op.nn.conv2d(left, right, **how) if len(weights) == 4 else relax.op.matmul(left, right)

    return lower_for(build, {"x": np.zeros(shape, "u1")}, _TILES).kernels


def loops_of(kernels: tvm.IRModule) -> tvm.IRModule:
    return to_loops(transform.BindTarget(_TILES.tvm_target.with_host(_TILES.tvm_target))(kernels))


def with_loops(mod: tvm.IRModule, mark: str, change: Any) -> tvm.IRModule:
    """Return `mod` with `change` applied to its loops that have `mark`."""

    def loop(stmt: tirx.For) -> tirx.Stmt:
        return change(stmt) if mark in stmt.annotations else stmt

    return tvm.IRModule(
        {v: f.with_body(tvm_ffi.structural_map(f.body, (tirx.For, loop))) for v, f in mod.functions.items()}
    )


def _int(value: int) -> tirx.Expr:
    return tirx.const(value, "int32")


def without_marks(loop: tirx.For) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body)


@pytest.mark.parametrize(
    ("shape", "weights", "several"),
    [
        ((1, 64, 14, 14), (64, 64, 1, 1), False),
        # Tiles of 9 and 8 columns.
        ((1, 64, 9, 17), (32, 64, 1, 1), True),
        ((128, 64), (64, 32), False),
    ],
)
def test_tiles_are_configured_once_for_all_products_of_a_shape(
    shape: tuple[int, ...], weights: tuple[int, ...], several: bool
) -> None:
    asm = build_kernels(kernels_of(shape, weights), _TILES.tvm_target).inspect_source("asm")
    configurations = len(re.findall(r"\bldtilecfg\b", asm))
    assert configurations > 1 if several else configurations == 1
    assert len(re.findall(r"\btilerelease\b", asm)) >= configurations
    assert re.search(r"\btdpbusd\b", asm)


def test_sums_are_not_set_to_zero_in_memory() -> None:
    written = write_tile_products(loops_of(kernels_of((1, 64, 7, 7), (64, 64, 3, 3))), _TILES.dot)
    assert ZEROS_MARK not in str(written)
    assert TILE_MARK not in str(written)


def test_without_tiles_nothing_changes() -> None:
    mod = loops_of(kernels_of((32, 64), (64, 32)))
    assert write_tile_products(mod, dataclasses.replace(_TILES.dot, tiles=False)).same_as(mod)


def test_a_tile_whose_reduction_lost_its_mark_is_refused() -> None:
    mod = with_loops(loops_of(kernels_of((32, 64), (64, 32))), SUMS_MARK, without_marks)
    with pytest.raises(BuildError, match="in a marked reduction"):
        write_tile_products(mod, _TILES.dot)


def test_a_tile_of_too_many_rows_is_refused() -> None:
    def longer(loop: tirx.For) -> tirx.For:
        extent = _int(17)
        return tirx.For(loop.loop_var, loop.min, extent, loop.kind, loop.body, None, loop.annotations)

    mod = with_loops(loops_of(kernels_of((32, 64), (64, 32))), TILE_MARK, longer)
    with pytest.raises(BuildError, match="at most 16 rows, got 17"):
        write_tile_products(mod, _TILES.dot)


def test_a_row_of_too_many_groups_is_refused() -> None:
    def longer(loop: tirx.For) -> tirx.For:
        groups = loop.body
        inner = tirx.For(groups.loop_var, groups.min, _int(17), groups.kind, groups.body)
        return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, inner, None, loop.annotations)

    mod = with_loops(loops_of(kernels_of((32, 64), (64, 32))), TILE_MARK, longer)
    with pytest.raises(BuildError, match="at most 16 groups in a row of a tile, got 17"):
        write_tile_products(mod, _TILES.dot)


def test_more_tiles_than_registers_are_refused() -> None:
    def wider(loop: tirx.For) -> tirx.For:
        return tirx.For(tirx.Var("more", "int32"), _int(0), _int(5), tirx.ForKind.UNROLLED, loop)

    mod = with_loops(loops_of(kernels_of((32, 64), (64, 32))), TILE_MARK, wider)
    with pytest.raises(BuildError, match="at most 4 tiles of sums"):
        write_tile_products(mod, _TILES.dot)
