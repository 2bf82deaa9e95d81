"""What a maximum or minimum of real numbers begins with: an infinity, not TVM's largest finite number.

The maximum of numbers that are all minus infinity, such as a row of a mask, is minus infinity; a comparison
with it finds such rows. The same holds for what TVM puts around an image whose maxima are pooled.
"""

from __future__ import annotations

import math
from typing import Final

import tvm
import tvm_ffi
from tvm import s_tir as st
from tvm import tirx

_BORDER: Final = "pad_temp"  # how TVM calls the block that writes what is around an image


def begin_with_infinities(mod: tvm.IRModule) -> tvm.IRModule:
    """Return `mod` with the first values of its reductions replaced; its functions are not scheduled yet."""

    def write(block: st.SBlock) -> st.SBlock:
        body, init = block.body, block.init
        if isinstance(init, tirx.BufferStore):
            init = tirx.BufferStore(init.buffer, _unlimited(init.value), init.indices)
        elif block.name_hint.startswith(_BORDER) and isinstance(body, tirx.BufferStore):
            value = tvm_ffi.structural_map(body.value, (tirx.FloatImm, _unlimited))
            body = tirx.BufferStore(body.buffer, value, body.indices)
        else:
            return block
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

    functions = {
        var: func.with_body(tvm_ffi.structural_map(func.body, (st.SBlock, write)))
        if isinstance(func, tirx.PrimFunc)
        else func
        for var, func in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs)


def _unlimited(value: tirx.Expr) -> tirx.Expr:
    """Return an infinity for the largest or most negative number of a type, else the value itself."""
    if not isinstance(value, tirx.FloatImm):
        return value
    dtype = str(value.ty.dtype)
    if abs(value.value) != tirx.max_value(dtype).value:
        return value
    return tirx.const(math.copysign(math.inf, value.value), dtype)
