"""Convolutions that leave out the taps of a window that read only padding.

A window with a dilation of 12 on 16 rows reads the padding with most of its taps: of a 3x3 window, a quarter
of the products are of the image. A space marks its anchor (`MARK`); here the inner loop over the window gets
a condition: that the row and the tile of columns that are computed read the image. Prefetches of weights are
added outside the condition (`prefetch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx

# The anchor's annotation: padding above and to the left, rows and columns of the image, strides, dilations.
# It is no part of a signature: only how many rows the heuristic takes depends on it.
MARK: Final = "idle_taps"

# The anchor's axes of rows and columns: of the output, and of the window.
_ROWS, _COLUMNS = (2, 6), (3, 7)


def skip_idle_taps(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled `func` with a condition around the taps of each marked convolution."""
    marked: list[st.SBlockRealize] = []

    def block(realize: st.SBlockRealize) -> None:
        if MARK in realize.block.annotations and len(realize.iter_values) > max(_COLUMNS):
            marked.append(realize)  # what sets sums to zero has no axes of the window

    tvm_ffi.structural_walk(func.body, (st.SBlockRealize, block))
    body = func.body
    for realize in marked:
        body = _guarded(body, realize)
    return func.with_body(body) if marked else func


def _guarded(body: tirx.Stmt, realize: st.SBlockRealize) -> tirx.Stmt:
    """Return `body` with the condition in the loop over the taps of `realize`.

    It is the loop over the window's columns, or over its rows if the window has one column. An unrolled loop
    keeps its statements.
    """
    numbers = [int(v) for v in realize.block.annotations[MARK]]
    axes = [
        (*(realize.iter_values[axis] for axis in pair), *numbers[place::2])
        for place, pair in enumerate((_ROWS, _COLUMNS))
    ]
    taps = [tap for _, tap, *_ in axes if isinstance(tap, tirx.Var)]

    def loop(stmt: tirx.For) -> tirx.For:
        if not taps or not stmt.loop_var.same_as(taps[-1]) or stmt.kind != tirx.ForKind.SERIAL:
            return stmt
        inside = _loops(stmt.body)
        conditions = []
        for output, tap, before, extent, stride, dilation in axes:
            first, last = (_at(output, {v: end * (n - 1) for v, n in inside.items()}) for end in (0, 1))
            conditions.append(last * stride + tap * dilation >= before)
            conditions.append(first * stride + tap * dilation <= before + extent - 1)
        guarded = tirx.IfThenElse(tirx.all(*conditions), stmt.body, None)
        return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, guarded, None, stmt.annotations)

    return tvm_ffi.structural_map(body, (tirx.For, loop))


def _at(value: tirx.Expr, places: Mapping[tirx.Var, int]) -> tirx.Expr:
    """Return `value` with numbers for the variables of `places`."""

    def number(var: tirx.Var) -> tirx.Expr:
        return tirx.const(places[var], var.ty.dtype) if var in places else var

    return tvm_ffi.structural_map(value, (tirx.Var, number))


def _loops(body: tirx.Stmt) -> Mapping[tirx.Var, int]:
    """Return the extent of each loop in `body`."""
    found: dict[tirx.Var, int] = {}

    def loop(stmt: tirx.For) -> None:
        found[stmt.loop_var] = int(stmt.extent)

    tvm_ffi.structural_walk(body, (tirx.For, loop))
    return found
