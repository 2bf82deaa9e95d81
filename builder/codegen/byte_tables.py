"""Replaces look-ups in tables of 256 bytes by the processor's table instruction.

A kernel reads `table[x]` for each byte `x` of a vector, which LLVM would load one by one. VPERMI2B reads 64
bytes from one half of the table, which is two vectors. A second VPERMI2B reads them from the other half, and
the highest bit of `x` chooses between the two.

Vectors of 16, 32 or 64 bytes are written like this, for processors with the instruction. Elsewhere the loads
stay as they are, and give the same bytes. If 16 bytes are the lowest ones of 16 integers, all 64 bytes of
these integers are looked up, and only then the lowest ones are taken. This saves the instructions that spread
16 bytes over a vector.

What the instruction computes: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2
(VPERMI2B).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from builder.codegen.bodies import with_bodies
from builder.kernels.instructions import instruction
from builder.kernels.spaces.quantisation import TABLE, is_look_up

_FEATURE: Final = "avx512vbmi"
_INSTRUCTION: Final = "x86.avx512.vpermi2var.qi.512"
_WHOLE: Final = 64  # lanes of the instruction
_LANES: Final = (16, 32, 64)
_NUMBERS: Final = 16  # of 32 bits, in as many bytes


def write_byte_tables(mod: tvm.IRModule, features: AbstractSet[str]) -> tvm.IRModule:
    """Write the reads of tables in all functions of `mod`, whose vector loops were vectorised before.

    `features`: the processor's features, as LLVM names them.
    """
    if _FEATURE not in features:
        return mod
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (TensorLoad, _written)))


def _written(load: TensorLoad) -> tirx.Expr:
    table, index = load.source, load.indices[0]
    count = int(index.ty.dtype.lanes)
    if not is_look_up(load) or count not in _LANES:
        return load
    whole = tirx.Var("bytes", f"uint8x{_WHOLE}")
    parts = [
        tirx.BufferLoad(table, [tirx.Ramp(tirx.const(first, "int32"), tirx.const(1, "int32"), _WHOLE)])
        for first in range(0, TABLE, _WHOLE)
    ]

    def half(low: tirx.Expr, high: tirx.Expr) -> tirx.Expr:
        return instruction(_INSTRUCTION, f"uint8x{_WHOLE}", low, whole, high)

    middle = tirx.Broadcast(tirx.const(TABLE // 2, "uint8"), _WHOLE)
    chosen = tirx.Select(whole < middle, half(*parts[:2]), half(*parts[2:]))
    if count == _WHOLE:
        return tirx.Let(whole, index.value, chosen)
    wide = index.value.value if isinstance(index.value, tirx.Cast) else None
    if wide is not None and str(wide.ty.dtype) == f"int32x{_NUMBERS}":
        found = tirx.Let(whole, tirx.reinterpret(f"uint8x{_WHOLE}", wide), chosen)
        return tirx.Cast(f"uint8x{count}", tirx.reinterpret(f"int32x{_NUMBERS}", found))
    few = tirx.Var("bytes", f"uint8x{count}")
    lanes = [tirx.const(lane, "int32") for lane in range(_WHOLE)]
    repeated = tirx.Shuffle([few] * (_WHOLE // count), lanes)
    result = tirx.Let(whole, repeated, tirx.Shuffle([chosen], lanes[:count]))
    return tirx.Let(few, index.value, result)
