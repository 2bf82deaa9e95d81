"""Reductions to a maximum or minimum of real numbers: they begin with an infinity, and carry NaN.

TVM's begin with the largest finite number. The maximum of numbers that are all minus infinity, such as a row
of a mask, is minus infinity; a comparison with it finds such rows. The same holds for what TVM puts around an
image whose maxima are pooled. TVM's also drop NaN where the processor's instruction does. Schedules only know
TVM's reductions, so this comes after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.ir import TensorLoad

from builder.kernels.decisions import NAN_MARK
from builder.kernels.real_numbers import is_float
from builder.kernels.spaces.limits import CARRYING, unless_nan

_BORDER: Final = "pad_temp"  # how TVM calls the block that writes what is around an image
_FIRST: Final = "_init"  # and how the name of a block ends that writes what a reduction begins with


def surround_with_infinities(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function, not scheduled yet, that pools maxima of images with infinities around them."""

    def write(block: st.SBlock) -> st.SBlock:
        return _with_body(block, _unlimited(block.body)) if block.name_hint.startswith(_BORDER) else block

    return _rewritten(func, write)


def begin_with_infinities(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled function whose maxima and minima begin with infinities."""

    def write(block: st.SBlock) -> st.SBlock:
        if block.init is not None:
            return _with_body(block, block.body, _unlimited(block.init))
        return _with_body(block, _unlimited(block.body)) if block.name_hint.endswith(_FIRST) else block

    return _rewritten(func, write)


def carry_nan(func: tirx.PrimFunc, arch: str) -> tirx.PrimFunc:
    """Return a scheduled function whose reductions with `NAN_MARK` are NaN if one of their elements is.

    `func`: the function. The first number of each extremum is what was found so far, the second a new one.
    `arch`: the machine's name, such as `x86_64`; its instruction carries NaN of the types in `CARRYING`.
    """
    carrying = CARRYING.get(arch, frozenset())

    def write(extremum: tirx.Max | tirx.Min) -> tirx.Expr:
        first = extremum.a
        if not isinstance(first, TensorLoad) or not is_float(first) or str(first.ty.dtype) in carrying:
            return extremum
        return unless_nan(extremum.b, type(extremum)(extremum.b, first))

    def write_block(block: st.SBlock) -> st.SBlock:
        if NAN_MARK not in block.annotations:
            return block
        body = tvm_ffi.structural_map(block.body, [(tirx.Max, write), (tirx.Min, write)])
        return _with_body(block, body, block.init)

    return _rewritten(func, write_block)


def _rewritten(func: tirx.PrimFunc, write: Callable[[st.SBlock], st.SBlock]) -> tirx.PrimFunc:
    return func.with_body(tvm_ffi.structural_map(func.body, (st.SBlock, write)))


def _with_body(block: st.SBlock, body: tirx.Stmt, init: tirx.Stmt | None = None) -> st.SBlock:
    return st.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        body,
        init,
        block.alloc_buffers,
        block.match_buffers,
        block.annotations,
        block.span,
    )


def _unlimited(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return a statement with infinities for the largest and most negative numbers of their types."""

    def number(value: tirx.FloatImm) -> tirx.Expr:
        dtype = str(value.ty.dtype)
        if abs(value.value) != tirx.max_value(dtype).value:
            return value
        return tirx.const(math.copysign(math.inf, value.value), dtype)

    return tvm_ffi.structural_map(stmt, (tirx.FloatImm, number))
