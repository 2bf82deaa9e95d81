"""Join the stores of 16 bytes that follow each other in memory, on x86 with AVX-512.

An epilogue rounds 16 numbers to 16 bytes: it limits and rounds them in three instructions, and VPMOVDB, which
takes as long as three, stores the lowest byte of each. The bytes of adjacent columns are adjacent, so up to
four vectors are rounded together: VCVTPS2DQ rounds to the nearest integer, to the even one if there are two;
VPACKSSDW and VPACKUSWB (VPACKSSWB for int8) limit integers while they join two vectors; the zero point is
added in between, limited to 16 bits. VPERMD orders what they left in quarters of vectors, and one instruction
stores up to 64 bytes. A table of bytes is read once for all of them.

Only the upper limit remains, because VCVTPS2DQ makes the lowest integer of a number that is too large. The
bytes are the same for every number, infinities and NaN included.

Only loops that are unrolled are joined. Elsewhere, and for numbers that become bytes in another way, the
stores stay as they are.

What the instructions compute: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2
(VCVTPS2DQ, VPACKSSDW, VPACKSSWB, VPACKUSWB, VPERMD).
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad

from builder.codegen.bodies import with_bodies
from builder.codegen.byte_rounding import Rounding
from builder.kernels.instructions import instruction
from builder.kernels.spaces.quantisation import is_look_up

_FEATURE: Final = "avx512bw"
_LANES: Final = 16  # 32-bit numbers in a vector
_WORDS: Final = 32
_BYTES: Final = 64
_TOGETHER: Final = 4  # vectors that are joined
_QUARTERS: Final = 4  # of a vector, in each of which VPACKSSDW and its kin work
_PACK: Final = {"int8": "packsswb", "uint8": "packuswb"}
_NEAREST: Final = 8  # rounded to the nearest, whatever MXCSR says


def join_byte_stores(mod: tvm.IRModule, features: AbstractSet[str]) -> tvm.IRModule:
    """Join the stores of bytes in all functions of `mod`, whose vector loops were vectorised before.

    `mod`: the functions. Their loops over the columns of a tile are marked as unrolled, but not unrolled yet.
    `features`: the processor's features, as LLVM names them. Nothing changes without AVX512BW.
    """
    if _FEATURE not in features:
        return mod
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.For, _joined_loop)))


def _joined_loop(loop: tirx.For) -> tirx.Stmt:
    store, extent = loop.body, loop.extent
    if loop.kind != tirx.ForKind.UNROLLED or not isinstance(extent, tirx.IntImm):
        return loop
    if not isinstance(store, tirx.BufferStore) or len(store.indices) != 1 or not _follows(store, loop):
        return loop
    steps: list[tirx.Stmt] = []
    for first in range(0, int(extent), _TOGETHER):
        columns = [loop.min + k for k in range(first, min(first + _TOGETHER, int(extent)))]
        values = [_at(store.value, loop.loop_var, column) for column in columns]
        joined = _joined([*values, *values[-1:] * (_TOGETHER - len(values))])
        if joined is None:
            return loop
        base, lanes = _at(store.indices[0].base, loop.loop_var, columns[0]), len(values) * _LANES
        steps.append(tirx.BufferStore(store.buffer, _lowest(joined, lanes), [tirx.Ramp(base, 1, lanes)]))
    return tirx.SeqStmt(steps) if len(steps) > 1 else steps[0]


def _at(expr: tirx.Expr, var: tirx.Var, value: tirx.Expr) -> tirx.Expr:
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda old: value if old.same_as(var) else old))


def _follows(store: tirx.BufferStore, loop: tirx.For) -> bool:
    """Whether 16 bytes are stored where those of the round before end, and no round reads what is stored."""
    [place] = store.indices
    if not isinstance(place, tirx.Ramp) or int(place.ty.dtype.lanes) != _LANES:
        return False
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(store.value, (TensorLoad, loads.append))
    if any(load.source.same_as(store.buffer) for load in loads):
        return False
    analyzer = sym.Analyzer()
    step = _at(place.base, loop.loop_var, loop.loop_var + 1) - place.base
    is_dense = analyzer.can_prove_equal(place.stride, tirx.const(1, str(place.stride.ty.dtype)))
    return bool(is_dense and analyzer.can_prove_equal(step, tirx.const(_LANES, str(step.ty.dtype))))


def _lowest(vector: tirx.Expr, lanes: int) -> tirx.Expr:
    if lanes == _BYTES:
        return vector
    return tirx.Shuffle([vector], [tirx.const(lane, "int32") for lane in range(lanes)])


def _joined(values: list[tirx.Expr]) -> tirx.Expr | None:
    """Return four vectors of 16 bytes as one; None unless they are rounded, or read from a table at such."""
    first = values[0]
    if isinstance(first, TensorLoad):
        if not is_look_up(first):
            return None
        index = _joined([value.indices[0].value for value in values])
        return None if index is None else tirx.BufferLoad(first.source, [tirx.Cast(f"int32x{_BYTES}", index)])
    if not isinstance(first, tirx.Cast):
        return None
    roundings = [Rounding.of(value) for value in values]
    known = [rounding for rounding in roundings if rounding is not None]
    if len(known) < len(values):
        return None
    same = all(tvm_ffi.structural_equal(rounding.point, known[0].point) for rounding in known)
    return _packed(known) if same else None


def _packed(roundings: list[Rounding]) -> tirx.Expr:
    """Return the bytes of four vectors of numbers."""
    kind = roundings[0].kind
    words = _words(*roundings[:2]), _words(*roundings[2:])
    packed = instruction(f"x86.avx512.{_PACK[kind]}.512", f"{kind}x{_BYTES}", *words)
    # Each quarter of `packed` has four bytes of each vector.
    order = [
        tirx.const(quarter * _QUARTERS + k, "int32") for k in range(_TOGETHER) for quarter in range(_QUARTERS)
    ]
    ordered = tirx.Shuffle([tirx.reinterpret(f"int32x{_LANES}", packed)], order)
    return tirx.reinterpret(f"{kind}x{_BYTES}", ordered)


def _words(low: Rounding, high: Rounding) -> tirx.Expr:
    """Return the integers of two vectors, their zero point added, limited to 16 bits, in quarters of each."""
    parts = [_integers(rounding) for rounding in (low, high)]
    words = instruction("x86.avx512.packssdw.512", f"int16x{_WORDS}", *parts)
    point = tirx.Broadcast(low.point.astype("int16"), _WORDS)
    return instruction(f"sadd.sat.v{_WORDS}i16", f"int16x{_WORDS}", words, point)


def _integers(rounding: Rounding) -> tirx.Expr:
    dtype = f"int32x{_LANES}"
    limited = tirx.Min(rounding.number, tirx.Broadcast(rounding.high, _LANES))
    zeros = tirx.Broadcast(tirx.const(0, "int32"), _LANES)
    all_lanes, mode = tirx.const(-1, "int16"), tirx.const(_NEAREST, "int32")
    return instruction("x86.avx512.mask.cvtps2dq.512", dtype, limited, zeros, all_lanes, mode)
