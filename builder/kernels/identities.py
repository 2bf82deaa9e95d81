"""What a maximum or minimum of real numbers begins with: an infinity, not TVM's largest finite number.

The maximum of numbers that are all minus infinity, such as a row of a mask, is minus infinity; a comparison
with it finds such rows. The same holds for what TVM puts around an image whose maxima are pooled. Schedules
only know reductions that begin as TVM's do, so this comes after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx

_BORDER: Final = "pad_temp"  # how TVM calls the block that writes what is around an image
_FIRST: Final = "_init"  # and how the name of a block ends that writes what a reduction begins with


def surround_with_infinities(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function, not scheduled yet, that pools maxima of images with infinities around them."""
    return _rewritten(func, lambda block: block.name_hint.startswith(_BORDER))


def begin_with_infinities(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled function whose maxima and minima begin with infinities."""
    return _rewritten(func, lambda block: block.init is not None or block.name_hint.endswith(_FIRST))


def _rewritten(func: tirx.PrimFunc, is_wanted: Callable[[st.SBlock], bool]) -> tirx.PrimFunc:
    def write(block: st.SBlock) -> st.SBlock:
        if not is_wanted(block):
            return block
        return st.SBlock(
            block.iter_vars,
            block.reads,
            block.writes,
            block.name_hint,
            block.body if block.init is not None else _unlimited(block.body),
            None if block.init is None else _unlimited(block.init),
            block.alloc_buffers,
            block.match_buffers,
            block.annotations,
            block.span,
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (st.SBlock, write)))


def _unlimited(stmt: tirx.Stmt) -> tirx.Stmt:
    """Return a statement with infinities for the largest and most negative numbers of their types."""

    def number(value: tirx.FloatImm) -> tirx.Expr:
        dtype = str(value.ty.dtype)
        if abs(value.value) != tirx.max_value(dtype).value:
            return value
        return tirx.const(math.copysign(math.inf, value.value), dtype)

    return tvm_ffi.structural_map(stmt, (tirx.FloatImm, number))
