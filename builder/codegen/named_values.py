"""Calls of functions, such as `log` of a vector of eight numbers, become arithmetic with named values.

LLVM makes a call to the C library of each element. A formula uses its argument several times, so formulas of
formulas would be trees that grow with each. So a call stays one while kernels are scheduled and simplified.
After that, its formula takes its place, and each value that is used several times is stored in a register: a
local buffer of one vector, which LLVM keeps in one.

A branch that not every element takes may load what is only there for those that take it, so nothing may be
stored before it. Its values get names instead, and a call whose argument has a formula stays one of the C
library: TVM analyses names in exponential time.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call

from builder.codegen.bodies import with_bodies
from builder.kernels.rewriter import op_name
from builder.kernels.spaces.vector_math import formula_of


def expand_functions(mod: tvm.IRModule) -> tvm.IRModule:
    """Write the formulas of calls, in all functions of `mod`; nothing may simplify them afterwards."""
    return with_bodies(
        mod, lambda body: tvm_ffi.structural_map(body, [(tirx.BufferStore, _stored), (tirx.Bind, _bound)])
    )


def _stored(store: tirx.BufferStore) -> tirx.Stmt:
    calls = _calls(store.value)
    if all(formula_of(call) is None for call in calls):
        return store
    if any(_is_branch(call) for call in calls):
        return tirx.BufferStore(store.buffer, _with_names(store.value), store.indices)
    steps: list[tirx.Stmt] = []

    def keep(value: tirx.Expr) -> tirx.Expr:
        dtype = value.ty.dtype
        register = tirx.decl_buffer((dtype.lanes,), str(dtype).partition("x")[0], "value", scope="local")
        zero = tirx.const(0, "int32")
        place = [zero if dtype.lanes == 1 else tirx.Ramp(zero, tirx.const(1, "int32"), dtype.lanes)]
        steps.extend((tirx.AllocBuffer(register), tirx.BufferStore(register, value, place)))
        return tirx.BufferLoad(register, place)

    def expand(call: Call) -> tirx.Expr:
        formula = formula_of(call)
        return call if formula is None else formula(keep(call.args[0]), keep)

    value = tvm_ffi.structural_map(store.value, (Call, expand))
    return tirx.SeqStmt([*steps, tirx.BufferStore(store.buffer, value, store.indices)])


def _bound(bind: tirx.Bind) -> tirx.Stmt:
    if all(formula_of(call) is None for call in _calls(bind.value)):
        return bind
    return tirx.Bind(bind.var, _with_names(bind.value))


def _with_names(value: tirx.Expr) -> tirx.Expr:
    """Return `value` with formulas in place of calls, their values named inside the expression."""
    # Variables stand for branches, the innermost first, which get names of their own.
    branches: list[tuple[tirx.Var, tirx.Expr]] = []

    def hold(call: Call) -> tirx.Expr:
        if not _is_branch(call):
            return call
        condition, *values = call.args
        branch = tirx.if_then_else(condition, *map(_without_branches, values))
        branches.append((tirx.Var("branch", str(call.ty.dtype)), branch))
        return branches[-1][0]

    value = _without_branches(tvm_ffi.structural_map(value, (Call, hold)))
    for var, branch in reversed(branches):
        value = _substituted(value, var, branch)
    return value


def _substituted(value: tirx.Expr, old: tirx.Var, new: tirx.Expr) -> tirx.Expr:
    return tvm_ffi.structural_map(value, (tirx.Var, lambda var: new if var.same_as(old) else var))


def _without_branches(value: tirx.Expr) -> tirx.Expr:
    named: list[tuple[tirx.Var, tirx.Expr]] = []

    def name(part: tirx.Expr) -> tirx.Expr:
        named.append((tirx.Var("value", str(part.ty.dtype)), part))
        return named[-1][0]

    def expand(call: Call) -> tirx.Expr:
        formula = formula_of(call)
        if formula is None or _uses(call, [var for var, _ in named]):
            return call
        return formula(name(call.args[0]), name)

    value = tvm_ffi.structural_map(value, (Call, expand))
    for var, part in reversed(named):
        value = tirx.Let(var, part, value)
    return value


def _uses(call: Call, variables: Sequence[tirx.Var]) -> bool:
    used: list[tirx.Var] = []
    tvm_ffi.structural_walk(call, (tirx.Var, used.append))
    return any(one.same_as(other) for one in used for other in variables)


def _calls(value: tirx.Expr) -> list[Call]:
    calls: list[Call] = []
    tvm_ffi.structural_walk(value, (Call, calls.append))
    return calls


def _is_branch(call: Call) -> bool:
    return op_name(call) == "prim.if_then_else"
