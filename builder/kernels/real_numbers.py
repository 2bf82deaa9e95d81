"""Keeps TVM from simplifying floats by rules that hold only for real numbers.

TVM's simplifier takes `x - x` for 0, `(x + y) - y` for x, `x == x` for true and `not x < y` for `y <= x`;
expressions fold `0 * x` and `0 / x` to 0 when they are made, and the code generator takes `x != NaN` for
false. None of this is right where a float is NaN, infinite, rounded or -0. So one operand is hidden: its bits
are read as an integer and back. That costs nothing: LLVM, which keeps the rules of IEEE 754, drops it.

`hidden` is for expressions that TVM would fold when they are made. `keep_floats` is for all others: kernels
come to it when their blocks are inlined, before anything simplifies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

_INTEGERS: Final = {"float16": "int16", "float32": "int32", "float64": "int64"}
_COMPARISONS: Final = (tirx.EQ, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def is_float(expr: tirx.Expr) -> bool:
    """Whether `expr` is a single number of a type whose bits can be hidden."""
    return str(expr.ty.dtype) in _INTEGERS


def hidden(expr: tirx.Expr) -> tirx.Expr:
    """Return the float `expr` in a form that equals nothing else for TVM."""
    dtype = str(expr.ty.dtype)
    return tirx.reinterpret(dtype, tirx.reinterpret(_INTEGERS[dtype], expr))


def keep_floats(body: tirx.Stmt) -> tirx.Stmt:
    """Return a kernel's body with operands hidden where TVM would take floats for real numbers."""
    return tvm_ffi.structural_map(body, list(_REWRITES.items()))


def _difference(expr: tirx.Sub) -> tirx.Expr:
    return tirx.Sub(expr.a, hidden(expr.b)) if _may_cancel(expr.a, expr.b) else expr


def _equality(expr: tirx.EQ) -> tirx.Expr:
    return tirx.EQ(expr.a, hidden(expr.b)) if _may_cancel(expr.a, expr.b) else expr


def _inequality(expr: tirx.NE) -> tirx.Expr:
    # TVM writes LLVM's `one`, which is false for NaN.
    return _inverted(_equality(tirx.EQ(expr.a, expr.b))) if is_float(expr.a) else expr


def _may_cancel(a: tirx.Expr, b: tirx.Expr) -> bool:
    """Whether `a` and `b` may have a term in common; the difference from 0 is the number itself."""
    if not is_float(b) or _is_hidden(b):
        return False
    return not (isinstance(b, tirx.FloatImm) and (b.value == 0 or isinstance(a, tirx.FloatImm)))


def _arithmetic(expr: tirx.Add | tirx.Mul | tirx.Div) -> tirx.Expr:
    a, b = (hidden(each) if _is_zero(each) else each for each in (expr.a, expr.b))
    return expr if a is expr.a and b is expr.b else type(expr)(a, b)


def _is_zero(expr: tirx.Expr) -> bool:
    return isinstance(expr, tirx.FloatImm) and expr.value == 0 and is_float(expr)


def _negation(expr: tirx.Not) -> tirx.Expr:
    return _inverted(expr.a) if _compares_floats(expr.a) else expr


def _inverted(expr: tirx.Expr) -> tirx.Expr:
    """Return not `expr`, in a form of which TVM does not negate the comparisons instead."""
    return tirx.bitwise_xor(expr, tirx.const(True, "bool"))


def _either(expr: tirx.Or) -> tirx.Expr:
    if _compares_floats(expr.a) and _compares_floats(expr.b):
        return tirx.bitwise_or(expr.a, expr.b)
    return expr


def _compares_floats(expr: tirx.Expr) -> bool:
    if isinstance(expr, _COMPARISONS):
        return is_float(expr.a)
    if isinstance(expr, (tirx.And, tirx.Or)):
        return _compares_floats(expr.a) or _compares_floats(expr.b)
    return isinstance(expr, tirx.Not) and _compares_floats(expr.a)


def _is_hidden(expr: tirx.Expr) -> bool:
    return isinstance(expr, Call) and expr.op.same_as(_REINTERPRET)


_REINTERPRET: Final = tvm.ir.Op.get("tirx.reinterpret")
_REWRITES: Final[dict[type, Callable[..., tirx.Expr]]] = {
    tirx.Sub: _difference,
    tirx.EQ: _equality,
    tirx.NE: _inequality,
    tirx.Add: _arithmetic,
    tirx.Mul: _arithmetic,
    tirx.Div: _arithmetic,
    tirx.Not: _negation,
    tirx.Or: _either,
}
