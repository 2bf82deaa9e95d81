"""Calls of functions, such as `log` of a vector of eight numbers, become arithmetic with named values.

LLVM makes a call to the C library of each element. A formula uses its argument several times, so formulas of
formulas would be trees that grow with each. So a call stays one while kernels are scheduled and simplified.
After that, its formula takes its place, and each value that is used several times gets a name.

The names are in front of a whole value that is stored, or of a branch that not every element takes, as it may
load what is only there for those that take it. A call whose argument has a formula stays a call of the C
library: TVM's analysis of named values takes exponential time in their depth.
"""

from __future__ import annotations

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from builder.kernels.rewriter import op_name
from builder.kernels.spaces.vector_math import formula_of


def expand_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the formulas of calls, in all functions of `mod`; nothing may simplify them afterwards."""
    changed = {
        var: func.with_body(
            tvm_ffi.structural_map(func.body, [(tirx.BufferStore, _stored), (tirx.Bind, _bound)])
        )
        for var, func in mod.functions.items()
        if isinstance(func, tirx.PrimFunc)
    }
    return tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs)


def _stored(store: tirx.BufferStore) -> tirx.Stmt:
    value = _with_formulas(store.value)
    return store if value is store.value else tirx.BufferStore(store.buffer, value, store.indices)


def _bound(bind: tirx.Bind) -> tirx.Stmt:
    value = _with_formulas(bind.value)
    return bind if value is bind.value else tirx.Bind(bind.var, value)


def _with_formulas(value: tirx.Expr) -> tirx.Expr:
    """Return `value` with formulas in place of calls, or `value` itself if it has no such calls."""
    found: list[Call] = []
    tvm_ffi.structural_walk(value, (Call, found.append))
    if all(formula_of(call) is None for call in found):
        return value
    # Variables stand for expressions with branches, the innermost first, which get names of their own.
    branching: list[tuple[tirx.Var, Call]] = []

    def hold(call: Call) -> tirx.Expr:
        if op_name(call) != "prim.if_then_else":
            return call
        condition, *branches = call.args
        branches = [_straight(branch) for branch in branches]
        held = tirx.Var("branching", str(call.ty.dtype))
        branching.append((held, tirx.if_then_else(condition, *branches)))
        return held

    value = _straight(tvm_ffi.structural_map(value, (Call, hold)))
    for held, call in reversed(branching):
        value = _substituted(value, held, call)
    return value


def _substituted(value: tirx.Expr, held: tirx.Var, call: Call) -> tirx.Expr:
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: call if var.same_as(held) else var))


def _straight(value: tirx.Expr) -> tirx.Expr:
    """Return a value without branches, with formulas in place of calls."""
    named: list[tuple[tirx.Var, tirx.Expr]] = []

    def name(part: tirx.Expr) -> tirx.Expr:
        named.append((tirx.Var(f"value{len(named)}", str(part.ty.dtype)), part))
        return named[-1][0]

    def expand(call: Call) -> tirx.Expr:
        formula = formula_of(call)
        if formula is None or _uses(call, named):
            return call
        return formula(name(call.args[0]), name)

    value = tvm_ffi.structural_map(value, (Call, expand))
    for var, part in reversed(named):
        value = tirx.Let(var, part, value)
    return value


def _uses(call: Call, named: list[tuple[tirx.Var, tirx.Expr]]) -> bool:
    """Whether a call's argument has a named value."""
    variables: list[tirx.Var] = []
    tvm_ffi.structural_walk(call, (tirx.Var, variables.append))
    return any(variable.same_as(var) for variable in variables for var, _ in named)
