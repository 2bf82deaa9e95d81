"""Padded copies that write their padding only around the data, instead of everywhere before the data.

TVM decomposes a padded copy into two nests of loops: one fills all of the buffer with zeros (or with the zero
point of bytes), the other copies the data into it. Here the first one skips the data: in a row with data, it
writes only the columns beside it. A depthwise convolution with few products for each element spends a tenth
of its time on this padding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.ir import Range, TensorLoad, TensorRegion

# Columns beside the data that are written one by one. A window with more padding keeps the loop.
_MOST_COLUMNS: Final = 16


@dataclass(frozen=True, slots=True)
class _Box:
    """The part of a buffer that a copy writes."""

    begin: tuple[int, ...]
    end: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, copy: st.SBlock) -> _Box | None:
        """Return what a block writes, None if it is not simply the place of its variables plus constants."""
        store = copy.body
        extents = [(var.var, int(var.dom.extent)) for var in copy.iter_vars]
        begin, end = [], []
        for index in store.indices:
            base, offset = (index.a, index.b) if isinstance(index, tirx.Add) else (index, 0)
            if not isinstance(offset, (int, tirx.IntImm)):
                return None
            extent = next((n for var, n in extents if base.same_as(var)), None)
            if extent is None:
                return None
            begin.append(int(offset))
            end.append(int(offset) + extent)
        return cls(tuple(begin), tuple(end), tuple(int(n) for n in store.buffer.shape))

    def is_padded(self, axis: int) -> bool:
        """Whether the buffer is longer than the box along an axis."""
        return (self.begin[axis], self.end[axis]) != (0, self.shape[axis])


def write_only_borders(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled function whose decomposed padded copies write each element once."""
    realizes: list[st.SBlockRealize] = []
    tvm_ffi.structural_walk(func.body, (st.SBlockRealize, realizes.append))
    leaves = [r for r in realizes if isinstance(r.block.body, tirx.BufferStore)]
    for zeros in leaves:
        store = zeros.block.body
        if not isinstance(store.value, tirx.FloatImm | tirx.IntImm):
            continue
        copies = [r for r in leaves if r.block.body.buffer.same_as(store.buffer) and not r.same_as(zeros)]
        variables = [var.var for var in zeros.block.iter_vars]
        plain = all(any(i.same_as(var) for var in variables) for i in store.indices)
        if len(copies) != 1 or not plain or not _moves(copies[0].block):
            continue
        box = _Box.of(copies[0].block)
        if box is not None:
            func = func.with_body(_Borders(zeros, copies[0], box).write(func.body))
    return func


def _moves(block: st.SBlock) -> bool:
    """Whether a block copies elements of another buffer."""
    value = block.body.value
    return isinstance(value, TensorLoad) and not value.source.same_as(block.body.buffer)


class _Borders:
    """Writes the loops over the zeros around a box."""

    def __init__(self, zeros: st.SBlockRealize, copy: st.SBlockRealize, box: _Box) -> None:
        self._zeros = zeros
        self._copy = copy
        self._box = box
        values = dict(zip((v.var for v in zeros.block.iter_vars), zeros.iter_values, strict=True))
        self._places = [values[i] for i in zeros.block.body.indices]

    def write(self, body: tirx.Stmt) -> tirx.Stmt:
        """Return `body` with the loops over the columns of the zeros replaced, if they have a known form."""
        chain = self._chain(body)
        axes = [axis for axis in range(len(self._places)) if self._box.is_padded(axis)]
        if not axes:
            return body
        column = max(axes)
        mine = _variables(self._places[column])
        first = next((n for n, loop in enumerate(chain) if loop.loop_var in mine), None)
        if first is None:
            return body
        # Where only rows are padded, their loop is the first, and the copy may stand in it, too.
        if _contains(chain[first].body, self._copy):
            return body
        inside = {loop.loop_var for loop in chain[first:]}
        others = [axis for axis in axes if axis != column]
        shared = any(_variables(place) & mine for n, place in enumerate(self._places) if n != column)
        if shared or any(_variables(self._places[axis]) & inside for axis in others):
            return body
        begin, end, extent = self._box.begin[column], self._box.end[column], self._box.shape[column]
        columns = [*range(begin), *range(end, extent)]
        if len(columns) > _MOST_COLUMNS:
            return body
        loops = [loop for loop in chain[first:] if loop.loop_var not in mine]
        beside = [self._one(column, number, loops, mine) for number in columns]
        old = chain[first]
        rows = [test for axis in others for test in self._tests(axis)]
        new: tirx.Stmt = tirx.SeqStmt(beside) if len(beside) > 1 else (beside or [tirx.Evaluate(0)])[0]
        if rows:
            new = tirx.IfThenElse(functools.reduce(tirx.And, rows), new, old)
        return tvm_ffi.structural_map(
            body, (tirx.For, lambda loop: new if loop.loop_var.same_as(old.loop_var) else loop)
        )

    def _tests(self, axis: int) -> list[tirx.Expr]:
        """Return the conditions for a place along an axis to be in the box."""
        place, tests = self._places[axis], []
        if self._box.begin[axis]:
            tests.append(place >= _like(place, self._box.begin[axis]))
        if self._box.end[axis] < self._box.shape[axis]:
            tests.append(place < _like(place, self._box.end[axis]))
        return tests

    def _chain(self, body: tirx.Stmt) -> list[tirx.For]:
        """Return the loops around the zeros, the outermost first."""
        loops: list[tirx.For] = []
        tvm_ffi.structural_walk(body, (tirx.For, loops.append))
        around = [loop for loop in loops if _contains(loop.body, self._zeros)]
        return sorted(around, key=lambda loop: -sum(_contains(loop.body, other) for other in around))

    def _one(self, axis: int, number: int, loops: Sequence[tirx.For], mine: set[tirx.Var]) -> tirx.Stmt:
        """Return the loops that write zeros in one column."""
        block = self._zeros.block
        fresh = {loop.loop_var: tirx.Var(loop.loop_var.name, str(loop.loop_var.ty.dtype)) for loop in loops}
        index = block.body.indices[axis]
        values = [
            _like(value, number) if var.var.same_as(index) else _renamed(value, fresh)
            for var, value in zip(block.iter_vars, self._zeros.iter_values, strict=True)
        ]
        tests = [t for t in _conjuncts(self._zeros.predicate) if not _variables(t) & mine]
        predicate = functools.reduce(tirx.And, [_renamed(t, fresh) for t in tests]) if tests else True
        stmt: tirx.Stmt = st.SBlockRealize(values, predicate, _copied(block))
        for loop in reversed(loops):
            stmt = tirx.For(fresh[loop.loop_var], loop.min, loop.extent, loop.kind, stmt)
        return stmt


def _copied(block: st.SBlock) -> st.SBlock:
    """Return a block of zeros with variables of its own."""
    fresh = {v.var: tirx.Var(v.var.name, str(v.var.ty.dtype)) for v in block.iter_vars}
    variables = [tirx.IterVar(v.dom, fresh[v.var], v.iter_type) for v in block.iter_vars]
    store = block.body
    indices = [fresh[i] for i in store.indices]
    region = block.writes[0]
    ranges = [Range.from_min_extent(i, _like(i, 1)) for i in indices]
    writes = [TensorRegion(region.source, ranges, region.ty)]
    body = tirx.BufferStore(store.buffer, store.value, indices)
    return st.SBlock(variables, [], writes, block.name_hint, body, None, None, None, block.annotations)


def _contains(stmt: tirx.Stmt, wanted: tirx.Stmt) -> bool:
    found: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(stmt, (type(wanted), found.append))
    return any(part.same_as(wanted) for part in found)


def _conjuncts(condition: tirx.Expr) -> list[tirx.Expr]:
    if isinstance(condition, tirx.And):
        return _conjuncts(condition.a) + _conjuncts(condition.b)
    return [] if isinstance(condition, tirx.IntImm) and int(condition) else [condition]


def _variables(expr: tirx.Expr) -> set[tirx.Var]:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return set(found)


def _renamed(expr: tirx.Expr, names: dict[tirx.Var, tirx.Var]) -> tirx.Expr:
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: names.get(var, var)))


def _like(value: tirx.Expr, number: int) -> tirx.Expr:
    return tirx.const(number, str(value.ty.dtype))
