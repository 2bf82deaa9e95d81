"""Simplifies indices that are linear in the loop variables, although they are not written so.

A loop over all elements of a tensor reads `x[f // 1736, f % 1736 // 31, f % 31]`, which is element `f`. TVM
simplifies each of these before it adds them up, and once `f` is a sum of loop variables, it may no longer see
that the parts belong together. A vector loop over such an index reads element by element.

Here an index is computed for every value of its variables. If a linear function gives the same numbers, it
takes the index's place: no rule of algebra is needed, and nothing is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm_ffi import structural_equal

from builder.codegen.bodies import with_bodies

# Larger ones would take a second each. An index has few variables, so most operators are below.
MOST_VALUES: Final = 1 << 22

_OPERATIONS: Final[Mapping[type, Callable[[Any, Any], Any]]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
}

Values = np.ndarray[Any, np.dtype[np.int64]]
Extents = Mapping[tirx.Var, int]


def simplify_indices(mod: tvm.IRModule) -> tvm.IRModule:
    """Simplify the indices in vector loops of all functions of `mod`, whose buffers are already flat."""
    return with_bodies(mod, lambda body: _Function().simplified(body, {}, vector=False))


class _Function:
    """The indices of a function; equal ones are computed once."""

    def __init__(self) -> None:
        self._known: list[tuple[tirx.Expr, tirx.Expr]] = []

    def simplified(self, stmt: tirx.Stmt, loops: Extents, *, vector: bool) -> tirx.Stmt:
        """Return a statement with simpler indices, inside `loops`."""
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self.simplified(part, loops, vector=vector) for part in stmt.seq])
        if isinstance(stmt, tirx.AttrStmt):
            body = self.simplified(stmt.body, loops, vector=vector)
            return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
        if isinstance(stmt, tirx.IfThenElse):
            yes = self.simplified(stmt.then_case, loops, vector=vector)
            no = stmt.else_case
            no = None if no is None else self.simplified(no, loops, vector=vector)
            return tirx.IfThenElse(stmt.condition, yes, no)
        if isinstance(stmt, tirx.For):
            known = isinstance(stmt.extent, tirx.IntImm) and isinstance(stmt.min, tirx.IntImm)
            inside = dict(loops)
            if known and not int(stmt.min):
                inside[stmt.loop_var] = int(stmt.extent)
            body = self.simplified(stmt.body, inside, vector=vector or stmt.kind == tirx.ForKind.VECTORIZED)
            return tirx.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body, None, stmt.annotations)
        if isinstance(stmt, tirx.BufferStore) and vector:
            return self._store(stmt, loops)
        return stmt

    def _store(self, stmt: tirx.BufferStore, loops: Extents) -> tirx.Stmt:
        def load(expr: TensorLoad) -> TensorLoad:
            if len(expr.indices) != 1:
                return expr
            index = self._index(expr.indices[0], loops)
            return expr if index is expr.indices[0] else tirx.BufferLoad(expr.source, [index])

        stmt = tvm_ffi.structural_map(stmt, (TensorLoad, load))
        if len(stmt.indices) != 1:
            return stmt
        return tirx.BufferStore(stmt.buffer, stmt.value, [self._index(stmt.indices[0], loops)])

    def _index(self, index: tirx.Expr, loops: Extents) -> tirx.Expr:
        for before, after in self._known:
            if structural_equal(before, index):
                return after
        after = _linear(index, loops)
        if after is None:
            return index
        self._known.append((index, after))
        return after


def _linear(index: tirx.Expr, loops: Extents) -> tirx.Expr | None:
    """Return a linear function of the loop variables that equals `index`; None if there is none to find."""
    divisions: list[tirx.Expr] = []
    tvm_ffi.structural_walk(index, ((tirx.FloorDiv, divisions.append), (tirx.FloorMod, divisions.append)))
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(index, (tirx.Var, found.append))
    variables = list(dict.fromkeys(found))
    dtype = str(index.ty.dtype)
    if not divisions or any(var not in loops or str(var.ty.dtype) != dtype for var in variables):
        return None
    extents = [loops[var] for var in variables]
    if math.prod(extents) > MOST_VALUES:
        return None
    grid = np.ogrid[tuple(slice(extent) for extent in extents)]
    at = {var: axis.astype(np.int64) for var, axis in zip(variables, grid, strict=True)}
    values = _values(index, at)
    if values is None:
        return None
    values = np.broadcast_to(values, extents)
    first = (0,) * len(extents)
    offset = int(values[first])
    linear: Values = np.asarray(offset, np.int64)
    expr: tirx.Expr = tirx.const(offset, dtype)
    for axis, var in enumerate(variables):
        if extents[axis] > 1:
            second = tuple(int(axis == other) for other in range(len(extents)))
            factor = int(values[second]) - offset
            linear = linear + factor * at[var]
            expr = var * tirx.const(factor, dtype) + expr
    return expr if np.array_equal(values, np.broadcast_to(linear, extents)) else None


def _values(expr: tirx.Expr, at: Mapping[tirx.Var, Values]) -> Values | None:
    """Return the values of an integer expression, None if it has an operation other than `_OPERATIONS`."""
    if isinstance(expr, tirx.IntImm):
        return np.asarray(int(expr), np.int64)
    if isinstance(expr, tirx.Var):
        return at[expr]
    operation = _OPERATIONS.get(type(expr))
    if operation is None:
        return None
    a, b = _values(expr.a, at), _values(expr.b, at)
    if a is None or b is None:
        return None
    values: Values = operation(a, b)
    return values
