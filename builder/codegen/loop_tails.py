"""Splits the last, incomplete tile of a loop off from the complete ones.

A tile that does not divide its axis leaves a condition around every statement inside it, such as
`o * 48 + t * 16 + j < 197`. LLVM cannot keep accumulators in registers around such a condition, and TVM
writes a vector loop with one as a loop over single elements. Here a loop is divided where the condition
changes: the complete tiles run without it, and the last tile is a copy of the body with shorter loops (loop
peeling, as in Allen and Kennedy, "Optimizing Compilers for Modern Architectures", 2001, section 5.7). A loop
that is divided among cores stays one loop, whose body chooses between the two.

A tensor expression may ask for the same with `if_then_else(likely(condition), value, otherwise)`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.s_tir.transform import ConvertSSA
from tvm_ffi import structural_equal

from builder.kernels.rewriter import op_name

Interval = tuple[int, int]
"""The least and the greatest value of an expression."""

_COPIES: Final = 8  # of the body of a loop that stays whole


@dataclass(frozen=True, slots=True)
class _Bound:
    """A condition `sum(factor * term) + offset < 0`.

    `terms`: the terms and their factors: loop variables, and quotients and remainders of them.
    """

    terms: tuple[tuple[tirx.Expr, int], ...]
    offset: int

    @classmethod
    def of(cls, condition: tirx.Expr) -> _Bound | None:
        """Return a condition in this form, None if it is not a strict comparison of integers."""
        if not isinstance(condition, tirx.LT) or not str(condition.a.ty.dtype).startswith("int"):
            return None
        terms: list[tuple[tirx.Expr, int]] = []
        offset = _add_terms(condition.a, 1, terms) + _add_terms(condition.b, -1, terms)
        return cls(tuple(terms), offset)

    def same_as(self, other: _Bound) -> bool:
        """Whether both are the same condition."""
        if self.offset != other.offset or len(self.terms) != len(other.terms):
            return False
        return all(any(f == g and structural_equal(t, u) for u, g in other.terms) for t, f in self.terms)

    def reduced(self, known: _Known) -> _Bound:
        """Return the same condition, with terms of a known value in the offset."""
        terms, offset = [], self.offset
        for term, factor in self.terms:
            interval = known.interval(term)
            if interval is not None and interval[0] == interval[1]:
                offset += factor * interval[0]
            else:
                terms.append((term, factor))
        return _Bound(tuple(terms), offset)

    @property
    def variables(self) -> set[tirx.Var]:
        """The loop variables in its terms."""
        return {v for term, _ in self.terms for v in _variables(term)}

    def total(self, known: _Known, without: tirx.Expr | None = None) -> Interval | None:
        """Return the interval of the sum, or of all but one term; None if a part of it is not known."""
        least = greatest = self.offset
        for other, factor in self.terms:
            if without is not None and structural_equal(other, without):
                continue
            interval = known.interval(other)
            if interval is None:
                return None
            ends = (factor * interval[0], factor * interval[1])
            least, greatest = least + min(ends), greatest + max(ends)
        return least, greatest


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the values of expressions at one place in a function.

    `loops`: loop variable -> its interval.
    `terms`: expressions that are not linear in the loop variables, and their intervals.
    `facts`: conditions that were tested further out, and whether they hold.
    """

    loops: Mapping[tirx.Var, Interval] = field(default_factory=dict)
    terms: tuple[tuple[tirx.Expr, Interval], ...] = ()
    facts: tuple[tuple[_Bound, bool], ...] = ()

    def with_loop(self, var: tirx.Var, interval: Interval) -> _Known:
        """Return the same, with the interval of a loop variable."""
        return replace(self, loops={**self.loops, var: interval})

    def with_term(self, term: tirx.Expr, interval: Interval) -> _Known:
        """Return the same, with the interval of a term."""
        if isinstance(term, tirx.Var):
            return self.with_loop(term, interval)
        return replace(self, terms=((term, interval), *self.terms))

    def with_fact(self, bound: _Bound, *, holds: bool) -> _Known:
        """Return the same, with a condition that was tested."""
        return replace(self, facts=((bound, holds), *self.facts))

    def holds(self, bound: _Bound) -> bool | None:
        """Return whether a condition holds, None if it depends on more than is known."""
        total = bound.total(self)
        if total is not None and total[1] < 0:
            return True
        if total is not None and total[0] >= 0:
            return False
        wanted = bound.reduced(self)
        return next((holds for fact, holds in self.facts if fact.reduced(self).same_as(wanted)), None)

    def interval(self, expr: tirx.Expr) -> Interval | None:
        """Return the interval of an integer expression, None if nothing is known about a part of it."""
        for term, interval in self.terms:
            if structural_equal(term, expr):
                return interval
        if isinstance(expr, tirx.IntImm):
            return int(expr), int(expr)
        if isinstance(expr, tirx.Var):
            return self.loops.get(expr)
        if not isinstance(expr, (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod)):
            return None
        a, b = self.interval(expr.a), self.interval(expr.b)
        return None if a is None or b is None else _combined(expr, a, b)


def _combined(expr: tirx.Expr, a: Interval, b: Interval) -> Interval | None:
    """Return the interval of an operation on two intervals, None for a divisor that is not constant."""
    if isinstance(expr, tirx.Add):
        return a[0] + b[0], a[1] + b[1]
    if isinstance(expr, tirx.Sub):
        return a[0] - b[1], a[1] - b[0]
    if isinstance(expr, tirx.Mul):
        corners = [x * y for x in a for y in b]
        return min(corners), max(corners)
    if b[0] != b[1] or b[0] <= 0:
        return None
    first, last = a[0] // b[0], a[1] // b[0]
    if isinstance(expr, tirx.FloorDiv):
        return first, last
    return (a[0] % b[0], a[1] % b[0]) if first == last else (0, b[0] - 1)


def _add_terms(expr: tirx.Expr, factor: int, terms: list[tuple[tirx.Expr, int]]) -> int:
    """Add the terms of `factor * expr` to `terms`, and return its constant part."""
    if isinstance(expr, tirx.IntImm):
        return factor * int(expr)
    if isinstance(expr, tirx.Add):
        return _add_terms(expr.a, factor, terms) + _add_terms(expr.b, factor, terms)
    if isinstance(expr, tirx.Sub):
        return _add_terms(expr.a, factor, terms) + _add_terms(expr.b, -factor, terms)
    if isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm):
        return _add_terms(expr.a, factor * int(expr.b), terms)
    for k, (term, known) in enumerate(terms):
        if structural_equal(term, expr):
            terms[k] = (term, known + factor)
            return 0
    terms.append((expr, factor))
    return 0


def _variables(expr: tirx.Expr) -> set[tirx.Var]:
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(expr, (tirx.Var, found.append))
    return set(found)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where the conditions on one term of a loop change.

    `term`: the loop's variable, or an expression of it.
    `whole`: for smaller values, the conditions always hold.
    `end`: from here on they never hold.
    """

    term: tirx.Expr
    whole: int
    end: int


def split_loop_tails(mod: tvm.IRModule) -> tvm.IRModule:
    """Split the incomplete tiles of all functions of `mod`, whose blocks and buffers are already lowered."""
    changed = {}
    for var, func in mod.functions.items():
        if isinstance(func, tirx.PrimFunc) and _has_condition(func.body):
            changed[var] = func.with_body(_split(func.body, _Known()) or tirx.Evaluate(0))
    if not changed:
        return mod
    new = tvm.IRModule({**dict(mod.functions.items()), **changed}, attrs=mod.attrs)
    return ConvertSSA()(new)


def _has_condition(body: tirx.Stmt) -> bool:
    found: list[tirx.IfThenElse | Call] = []

    def call(expr: Call) -> None:
        if _calls(expr, "prim.likely"):
            found.append(expr)

    tvm_ffi.structural_walk(body, ((tirx.IfThenElse, found.append), (Call, call)))
    return bool(found)


def _split(stmt: tirx.Stmt, known: _Known) -> tirx.Stmt | None:
    """Return `stmt` with its loops split, None if it never runs."""
    if isinstance(stmt, tirx.SeqStmt):
        return _sequence([_split(part, known) for part in stmt.seq])
    if isinstance(stmt, tirx.AttrStmt):
        body = _split(stmt.body, known)
        return None if body is None else tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
    if isinstance(stmt, tirx.IfThenElse):
        return _conditional(stmt, known)
    if isinstance(stmt, tirx.For):
        return _loop(stmt, known)
    if isinstance(stmt, tirx.BufferStore) and _likely_values(stmt):
        return _store(stmt, known)
    return stmt


def _store(stmt: tirx.BufferStore, known: _Known) -> tirx.Stmt:
    """Return a store without the conditional values that are known."""

    def decided(call: Call) -> tirx.Expr:
        if not _is_likely_value(call):
            return call
        bound = _Bound.of(call.args[0].args[0])
        holds = None if bound is None else known.holds(bound)
        return call if holds is None else call.args[1] if holds else call.args[2]

    return tvm_ffi.structural_map(stmt, (Call, decided))


def _is_likely_value(expr: tirx.Expr) -> bool:
    """Whether an expression is `if_then_else(likely(condition), value, otherwise)`."""
    return _calls(expr, "prim.if_then_else") and _calls(expr.args[0], "prim.likely")


def _calls(expr: tirx.Expr, name: str) -> bool:
    return isinstance(expr, Call) and op_name(expr) == name


def _likely_values(stmt: tirx.BufferStore) -> list[Call]:
    found: list[Call] = []
    tvm_ffi.structural_walk(stmt.value, (Call, found.append))
    return [call for call in found if _is_likely_value(call)]


def _sequence(parts: list[tirx.Stmt | None]) -> tirx.Stmt | None:
    """Return the statements in order, None if there are none, or only allocations."""
    kept = [part for part in parts if part is not None]
    if all(isinstance(part, (tirx.AllocBuffer, tirx.DeclBuffer)) for part in kept):
        return None
    return tirx.SeqStmt(kept) if len(kept) > 1 else kept[0]


def _conjuncts(condition: tirx.Expr) -> list[tirx.Expr]:
    if isinstance(condition, tirx.And):
        return _conjuncts(condition.a) + _conjuncts(condition.b)
    if _calls(condition, "prim.likely"):
        return _conjuncts(condition.args[0])
    return [condition]


def _conditional(stmt: tirx.IfThenElse, known: _Known) -> tirx.Stmt | None:
    """Return a conditional statement without the conditions that are known to hold."""
    if stmt.else_case is not None:
        yes, no = _split(stmt.then_case, known), _split(stmt.else_case, known)
        return tirx.IfThenElse(stmt.condition, yes or tirx.Evaluate(0), no)
    left = []
    for condition in _conjuncts(stmt.condition):
        bound = _Bound.of(condition)
        holds = None if bound is None else known.holds(bound)
        if holds is False:
            return None
        if holds is None:
            left.append(condition)
    body = _split(stmt.then_case, known)
    if body is None or not left:
        return body
    return tirx.IfThenElse(functools.reduce(tirx.And, left), body, None)


def _loop(loop: tirx.For, known: _Known) -> tirx.Stmt | None:
    """Return a loop, split where the conditions inside it change; None if it does nothing."""
    if not isinstance(loop.extent, tirx.IntImm) or not isinstance(loop.min, tirx.IntImm) or int(loop.min):
        body = _split(loop.body, known)
        return None if body is None else _like(loop, body)
    inside = known.with_loop(loop.loop_var, (0, int(loop.extent) - 1))
    cut = None if loop.kind == tirx.ForKind.PARALLEL else _cut(loop, inside, own=True)
    if cut is None:
        body = _body(loop, inside, _COPIES)
        return None if body is None else _like(loop, body)
    whole = _part(loop, 0, cut.whole, known)
    partial = _part(loop, cut.whole, cut.end, known)
    return _sequence([whole, partial, _part(loop, cut.end, int(loop.extent), known)])


def _part(loop: tirx.For, begin: int, end: int, known: _Known) -> tirx.Stmt | None:
    """Return the rounds of a loop from `begin` to `end`, None if they do nothing."""
    if begin >= end:
        return None
    if end == begin + 1:  # TVM has no vectors of one element
        return _split(_at(loop.body, loop.loop_var, begin), known)
    body = loop.body
    if begin:
        body = _replaced(body, loop.loop_var, loop.loop_var + tirx.const(begin, str(loop.extent.ty.dtype)))
    return _loop(_like(loop, body, end - begin), known)


def _body(loop: tirx.For, known: _Known, copies: int) -> tirx.Stmt | None:
    """Return the body of a loop that stays whole: it chooses among copies of itself."""
    if copies < 2:
        return _split(loop.body, known)
    guard = _guard(loop, known)
    if guard is not None:
        condition, bound = guard
        yes = _body(loop, known.with_fact(bound, holds=True), copies // 2)
        no = _body(loop, known.with_fact(bound, holds=False), copies // 2)
        if yes is None:
            return None if no is None else tirx.IfThenElse(tirx.Not(condition), no, None)
        return tirx.IfThenElse(condition, yes, no)
    cut = _cut(loop, known, own=False)
    if cut is None:
        return _split(loop.body, known)
    interval = known.interval(cut.term)
    assert interval is not None
    whole = _body(loop, known.with_term(cut.term, (interval[0], cut.whole - 1)), copies // 2)
    last = _like(loop, _at(loop.body, cut.term, cut.whole))
    # The conditions in `last` have the value of the term, facts that are known already have the term.
    rest = _body(last, known.with_term(cut.term, (cut.whole, cut.whole)), copies // 2)
    if whole is None or rest is None:
        return whole or rest
    return tirx.IfThenElse(cut.term < tirx.const(cut.whole, str(cut.term.ty.dtype)), whole, rest)


def _guard(loop: tirx.For, known: _Known) -> tuple[tirx.Expr, _Bound] | None:
    """Return a condition in a loop that depends on its variable and not on those of inner loops, if any."""
    for condition, bound, place in _conditions(loop.body, known):
        used = bound.variables
        if loop.loop_var in used and used <= set(known.loops) and place.holds(bound) is None:
            return condition, bound
    return None


def _cut(loop: tirx.For, known: _Known, *, own: bool) -> _Cut | None:
    """Return where the conditions in a loop change, for the first term that leaves one incomplete tile.

    `own`: whether to look for the loop's variable only, rather than for any term that contains it.
    """
    cut: _Cut | None = None
    for _, bound, place in _conditions(loop.body, known):
        if place.holds(bound) is not None:
            continue
        for term, factor in bound.terms:
            if factor <= 0 or (own and not term.same_as(loop.loop_var)):
                continue
            if loop.loop_var not in _variables(term):
                continue
            if not _variables(term) <= set(known.loops) or (cut and not structural_equal(cut.term, term)):
                continue
            interval, others = known.interval(term), bound.total(place, without=term)
            if interval is None or others is None:
                continue
            low, high = interval[0], interval[1] + 1
            whole = max(low, min(high, -(others[1] // factor)))
            end = max(low, min(high, -(others[0] // factor)))
            cut = _Cut(term, min(whole, cut.whole), max(end, cut.end)) if cut else _Cut(term, whole, end)
            break
    if cut is None or cut.end > cut.whole + 1:
        return None
    interval = known.interval(cut.term)
    assert interval is not None
    if own:
        single = loop.kind == tirx.ForKind.VECTORIZED and cut.end > cut.whole
        return None if single and cut.whole else cut
    return cut if interval[0] < cut.whole <= interval[1] and cut.end > interval[1] else None


def _conditions(stmt: tirx.Stmt, known: _Known) -> Iterator[tuple[tirx.Expr, _Bound, _Known]]:
    """Iterate over the conditions in `stmt`, each with what is known where it is tested."""
    if isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _conditions(part, known)
    elif isinstance(stmt, tirx.AttrStmt):
        yield from _conditions(stmt.body, known)
    elif isinstance(stmt, tirx.For):
        if isinstance(stmt.extent, tirx.IntImm) and isinstance(stmt.min, tirx.IntImm):
            low = int(stmt.min)
            known = known.with_loop(stmt.loop_var, (low, low + int(stmt.extent) - 1))
        yield from _conditions(stmt.body, known)
    elif isinstance(stmt, tirx.BufferStore):
        for call in _likely_values(stmt):
            bound = _Bound.of(call.args[0].args[0])
            if bound is not None:
                yield call.args[0].args[0], bound, known
    elif isinstance(stmt, tirx.IfThenElse):
        for condition in _conjuncts(stmt.condition) if stmt.else_case is None else ():
            bound = _Bound.of(condition)
            if bound is not None:
                yield condition, bound, known
        for case in (stmt.then_case, stmt.else_case):
            if case is not None:
                yield from _conditions(case, known)


def _at(body: tirx.Stmt, term: tirx.Expr, value: int) -> tirx.Stmt:
    """Return `body` with `value` in place of `term`."""
    return _replaced(body, term, tirx.const(value, str(term.ty.dtype)))


def _replaced(body: tirx.Stmt, term: tirx.Expr, new: tirx.Expr) -> tirx.Stmt:
    """Return `body` with `new` in place of `term`."""

    def replaced(expr: tirx.Expr) -> tirx.Expr:
        return new if structural_equal(expr, term) else expr

    return tvm_ffi.structural_map(body, (type(term), replaced))


def _like(loop: tirx.For, body: tirx.Stmt, extent: int | None = None) -> tirx.For:
    """Return `loop` with another body, and another extent if one is given."""
    count = loop.extent if extent is None else tirx.const(extent, str(loop.extent.ty.dtype))
    return tirx.For(loop.loop_var, loop.min, count, loop.kind, body, None, loop.annotations)
