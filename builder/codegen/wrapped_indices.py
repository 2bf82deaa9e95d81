"""Indices that wrap around within a loop over single elements, such as `x[j % 16]` for j below 64.

LLVM's loop vectoriser (LLVM 22, as it comes with TVM) takes a remainder of a loop variable by a power of two
for a number that only grows, and reads on past the end of `x` (docs/llvm-wrapped-indices.md). TVM's schedules
form such loops wherever a tensor is repeated, or read in another shape. Here a loop that runs through such a
remainder several times becomes two loops, and the remainder the variable of the inner one: LLVM makes vectors
of it. Where the remainder does not begin with the loop, it is written as a product in fixed point, which LLVM
does not look into.

Loops with vectors of TVM's in them stay as they are: LLVM does not vectorise them again.
"""

from __future__ import annotations

from typing import Final

import tvm
import tvm_ffi
from tvm import sym, tirx

from builder.codegen.bodies import with_bodies
from builder.kernels.instructions import instruction

# LLVM writes loops inside a loop out up to some hundred operations, and then vectorises the loop around them.
_MOST_WRITTEN_OUT: Final = 256


def split_wrapping_loops(mod: tvm.IRModule) -> tvm.IRModule:
    """Split the loops of all functions of `mod` whose variable wraps around; vectors are written already."""
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.For, _split)))


def hide_remainders(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the remainders that are left as products; nothing may simplify them afterwards.

    With k bits kept of 32, `x % 2^k` is the upper half of `(x << (32 - k)) * 2^k`.
    """
    return with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.For, _hidden)))


def _split(loop: tirx.For) -> tirx.For:
    if not _is_vectorised_by_llvm(loop):
        return loop
    var, extent = loop.loop_var, int(loop.extent)
    periods = [int(r.b) for r in _remainders(loop) if r.a.same_as(var)]
    period = max((p for p in periods if p < extent and extent % p == 0), default=0)
    if not period:
        return loop
    dtype = str(var.ty.dtype)
    outer, inner = tirx.Var(f"{var.name}_outer", dtype), tirx.Var(var.name, dtype)
    analyzer = sym.Analyzer()
    analyzer.bind(inner, tvm.ir.Range(0, period))
    analyzer.bind(outer, tvm.ir.Range(0, extent // period))
    at = outer * tirx.const(period, dtype) + inner

    def simplify(expr: tirx.FloorMod | tirx.FloorDiv) -> tirx.Expr:
        return analyzer.simplify(expr)

    body = tvm_ffi.structural_map(loop.body, (tirx.Var, lambda each: at if each.same_as(var) else each))
    body = tvm_ffi.structural_map(body, [(tirx.FloorMod, simplify), (tirx.FloorDiv, simplify)])
    within = _split(
        tirx.For(inner, tirx.const(0, dtype), tirx.const(period, dtype), tirx.ForKind.SERIAL, body)
    )
    count = tirx.const(extent // period, dtype)
    return tirx.For(outer, tirx.const(0, dtype), count, loop.kind, within, None, loop.annotations)


def _hidden(loop: tirx.For) -> tirx.For:
    if not _is_vectorised_by_llvm(loop):
        return loop
    remainders = _remainders(loop)

    def hide(expr: tirx.FloorMod) -> tirx.Expr:
        if not any(expr.same_as(remainder) for remainder in remainders):
            return expr
        dtype = str(expr.ty.dtype)
        bits = int(dtype.removeprefix("int"))
        high = expr.a << tirx.const(bits - int(expr.b).bit_length() + 1, dtype)
        return instruction("umul.fix", dtype, high, expr.b, tirx.const(bits, "int32"))

    return loop if not remainders else tvm_ffi.structural_map(loop, (tirx.FloorMod, hide))


def _is_vectorised_by_llvm(loop: tirx.For) -> bool:
    """Whether LLVM may vectorise a loop: nothing in it is a vector, and loops inside it are short."""
    if loop.kind not in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
        return False
    rounds = 1
    vectors: list[tirx.Expr] = []
    inner: list[tirx.For] = []
    tvm_ffi.structural_walk(
        loop.body, [((tirx.Ramp, tirx.Broadcast), vectors.append), (tirx.For, inner.append)]
    )
    for each in inner:
        rounds *= int(each.extent) if isinstance(each.extent, tirx.IntImm) else _MOST_WRITTEN_OUT + 1
    is_known = (
        isinstance(loop.extent, tirx.IntImm) and isinstance(loop.min, tirx.IntImm) and not int(loop.min)
    )
    return is_known and not vectors and rounds <= _MOST_WRITTEN_OUT


def _remainders(loop: tirx.For) -> list[tirx.FloorMod]:
    """Return the remainders by a power of two that depend on a loop's variable."""
    found: list[tirx.FloorMod] = []
    names: list[tirx.Bind] = []
    tvm_ffi.structural_walk(loop.body, [(tirx.FloorMod, found.append), (tirx.Bind, names.append)])
    depends = {loop.loop_var}
    for name in names:
        if not depends.isdisjoint(_variables(name.value)):
            depends.add(name.var)
    return [r for r in found if _is_power_of_two(r.b) and not depends.isdisjoint(_variables(r.a))]


def _is_power_of_two(expr: tirx.Expr) -> bool:
    return isinstance(expr, tirx.IntImm) and int(expr) > 1 and not int(expr) & (int(expr) - 1)


def _variables(expr: tirx.Expr) -> set[tirx.Var]:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return set(found)
