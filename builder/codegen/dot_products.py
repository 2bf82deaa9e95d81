"""Sums of products of small integers, as the instructions that processors have for them.

A design space marks the loop over the lanes of a vector of int32 sums (`dot_loops.mark_dot`). Inside it runs
a short loop, the group, over adjacent elements of both factors:

    for v in range(lanes):
        for g in range(group):
            sums[s + v] += int32(x[a + g]) * int32(weights[b + v * group + g])

The group may be two loops, over pairs `h` and the elements of a pair, where weights are stored by pairs:
`weights[b + 2 * lanes * h + 2 * v + g]`. Such a group may be a multiple of the instruction's, if the sums of
its even and of its odd products fit 16 bits (`dot_loops.fits_words`).

A depthwise convolution has lanes with data of their own (`dot_loops.mark_lanes`), and the elements of a group
are in several rows, or in adjacent pixels, which are `lanes` apart:

            sums[s + v] += int32(x[a + g * row + v]) * int32(weights[b + v * group + g])

LLVM does not find the instruction for such loops. So they are written here: with the instruction if the
processor has it, else with arithmetic that any processor has. So the kernels of another device also run on
this machine, and give exactly the same sums, which wrap around as int32.

What the instructions compute: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2
(PMADDWD, VPDPBUSD); Arm Architecture Reference Manual for A-profile architecture (SDOT).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import tvm
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import TensorLoad

from builder.codegen.bodies import with_bodies
from builder.errors import BuildError
from builder.kernels.instructions import instruction
from builder.kernels.spaces.dot_loops import DOT_MARK, LANES_MARK
from builder.target.dot import Dot

_FACTORS: Final = ("uint8", "int8", "int16")


def write_dot_products(mod: tvm.IRModule, dot: Dot) -> tvm.IRModule:
    """Write the marked loops of all functions of `mod`, whose buffers are flat and whose tiles are complete.

    `dot`: the instruction of the processor that will run them. It need not be the one that they were
        scheduled for.
    Raises `BuildError` if a marked loop has another form than described above: a fault of the design space.
    """
    errors: list[BuildError] = []

    def loop(stmt: tirx.For) -> tirx.Stmt:
        kind = next((kind for mark, kind in _LOOPS.items() if mark in stmt.annotations), None)
        if kind is None:
            return stmt
        condition, marked = _without_condition(stmt)
        try:
            made = kind.of(marked).write(dot)
            return made if condition is None else tirx.IfThenElse(condition, made, None)
        except BuildError as error:  # TVM, which calls this, would make a RuntimeError of it
            errors.append(error)
            return stmt

    written = with_bodies(mod, lambda body: tvm_ffi.structural_map(body, (tirx.For, loop)))
    if errors:
        raise errors[0]
    return written


def _without_condition(loop: tirx.For) -> tuple[tirx.Expr | None, tirx.For]:
    """Take out the condition of an incomplete tile, which is the same for all rounds of the loops."""
    body: tirx.Stmt = loop
    inside: list[tirx.Var] = []
    while isinstance(body, tirx.For):
        inside.append(body.loop_var)
        body = body.body
    if not isinstance(body, tirx.IfThenElse) or body.else_case is not None:
        return None, loop
    if not isinstance(body.then_case, tirx.BufferStore):
        return None, loop  # which is an error of the space
    used: list[tirx.Var] = []
    tvm_ffi.structural_walk(body.condition, (tirx.Var, used.append))
    if any(var.same_as(each) for var in used for each in inside):
        return None, loop
    return body.condition, tvm_ffi.structural_map(loop, (tirx.IfThenElse, lambda each: each.then_case))


@dataclass(frozen=True, slots=True)
class _Place:
    """A buffer, with the index of the first element that a loop reads or writes."""

    buffer: tirx.Buffer
    at: tirx.Expr

    @property
    def dtype(self) -> str:
        """The type of an element."""
        return str(self.buffer.dtype)

    def load(self, first: int, count: int) -> tirx.Expr:
        """Return `count` adjacent elements as a vector, from the number `first` on."""
        return tirx.BufferLoad(self.buffer, [_ramp(self.at + first, count)])

    def store(self, first: int, value: tirx.Expr) -> tirx.Stmt:
        """Return the store of a vector, from the number `first` on."""
        return tirx.BufferStore(self.buffer, value, [_ramp(self.at + first, int(value.ty.dtype.lanes))])


@dataclass(frozen=True, slots=True)
class _DotLoop:
    """A marked loop.

    `members`: for each element of the group, its place among the weights of a step.
    `stride`: weights from one lane to the next.
    `sums`, `data`, `weights`: where they begin.
    """

    lanes: int
    members: tuple[int, ...]
    stride: int
    sums: _Place
    data: _Place
    weights: _Place

    @classmethod
    def of(cls, loop: tirx.For) -> _DotLoop:
        """Read a marked loop."""
        lanes, body = int(loop.extent), loop.body
        variables, extents = [loop.loop_var], []
        while isinstance(body, tirx.For):
            variables.append(body.loop_var)
            extents.append(int(body.extent))
            body = body.body
        if not isinstance(body, tirx.BufferStore):
            raise BuildError("expected one sum in a loop of products, got something else")
        factors = factors_of(body)
        if factors is None:
            raise BuildError(f"expected a sum of products of integers, got {body.value}")

        def place(load: TensorLoad | tirx.BufferStore, source: tirx.Buffer, *wanted: list[int]) -> tirx.Expr:
            (index,) = load.indices
            parts = sym.detect_linear_equation(index, variables)
            steps = [int(p) if isinstance(p, tirx.IntImm) else None for p in parts[:-1]]
            if not parts or steps not in wanted:
                raise BuildError(f"expected adjacent elements of {source.name}, got the index {index}")
            return parts[-1]

        group = math.prod(extents)
        inside = [math.prod(extents[at + 1 :]) for at in range(len(extents))]
        straight, halves = [group, *inside], [2, 2 * lanes, 1]
        data, weights = factors
        places = [straight, halves] if len(extents) == 2 else [straight]
        datum = place(data, data.source, [0, *inside])
        first = place(weights, weights.source, *places)
        is_straight = sym.detect_linear_equation(weights.indices[0], variables)[0].value == group
        by_pairs = (2 * lanes * h + g for h in range(group // 2) for g in range(2))
        members = range(group) if is_straight else by_pairs
        return cls(
            lanes,
            tuple(members),
            group if is_straight else 2,
            _Place(body.buffer, place(body, body.buffer, [1, *[0] * len(extents)])),
            _Place(data.source, datum),
            _Place(weights.source, first),
        )

    @property
    def group(self) -> int:
        """Elements that are added to one sum."""
        return len(self.members)

    def write(self, dot: Dot) -> tirx.Stmt:
        """Return the loop with an instruction of `dot` for each vector, or without one if it does not fit."""
        group = dot.word_group if self.data.dtype == "int16" else dot.group
        halves = self.stride != self.group
        whole = self.group == group or (halves and group > 1 and self.group % group == 0)
        fits = whole and self.lanes % dot.lanes == 0 and halves == dot.halves
        dtypes = (self.data.dtype, self.weights.dtype)
        if dot.name in _INSTRUCTIONS and fits and dtypes in ((dot.data, "int8"), ("int16", dot.data)):
            return self._vectors(dot.lanes, lambda first: _INSTRUCTIONS[dot.name](self, first, dot))
        return self._vectors(self.lanes, self._plain)

    def _vectors(self, lanes: int, value: Callable[[int], tirx.Expr]) -> tirx.Stmt:
        """Return a store of `value` for each vector of sums; it takes the number of the first lane."""
        stores = [self.sums.store(first, value(first)) for first in range(0, self.lanes, lanes)]
        return stores[0] if len(stores) == 1 else tirx.SeqStmt(stores)

    def _plain(self, first: int) -> tirx.Expr:
        """Return the sums of all lanes, in arithmetic that any processor has."""
        total, dtype = self.sums.load(first, self.lanes), f"int32x{self.lanes}"
        for number, member in enumerate(self.members):
            factor = tirx.Broadcast(self.data.load(number, 1).astype("int32"), self.lanes)
            w = self.weights.at + member
            index = w if self.lanes == 1 else tirx.Ramp(w, _int(self.stride), self.lanes)
            total = total + factor * tirx.BufferLoad(self.weights.buffer, [index]).astype(dtype)
        return total

    def repeated_data(self, lanes: int) -> tirx.Expr:
        """Return the group of the left factor, repeated for each lane."""
        words = tirx.Broadcast(tirx.reinterpret("int32", self.data.load(0, self.group)), lanes)
        return tirx.reinterpret(f"{self.data.dtype}x{lanes * self.group}", words)

    def some_weights(self, first: int, lanes: int) -> tirx.Expr:
        """Return the weights of the lanes from `first` on."""
        return self.weights.load(first * self.group, lanes * self.group)


@dataclass(frozen=True, slots=True)
class _LaneLoop:
    """A marked loop whose lanes have data of their own, in several rows.

    `row`: elements from one row of data to the next.
    `sums`, `data`, `weights`: where they begin.
    """

    lanes: int
    group: int
    row: int
    sums: _Place
    data: _Place
    weights: _Place

    @classmethod
    def of(cls, loop: tirx.For) -> _LaneLoop:
        """Read a marked loop."""
        inner = loop.body
        store = inner.body if isinstance(inner, tirx.For) else inner
        factors = factors_of(store) if isinstance(store, tirx.BufferStore) else None
        if factors is None or store is inner:
            raise BuildError(f"expected a sum of products of integers in two loops, got {loop.body}")
        group, variables = int(inner.extent), [loop.loop_var, inner.loop_var]

        def steps(indices: Sequence[tirx.Expr]) -> tuple[list[int | None], tirx.Expr | None]:
            parts = sym.detect_linear_equation(indices[0], variables)
            known = [int(p) if isinstance(p, tirx.IntImm) else None for p in parts[:-1]]
            return known, parts[-1] if parts else None

        data, weights = factors
        (sums, s), (values, a), (numbers, b) = (steps(x.indices) for x in (store, data, weights))
        if sums != [1, 0] or numbers != [group, 1] or values[:1] != [1] or values[1] is None:
            raise BuildError(f"expected lanes with data of their own, got {store}")
        return cls(
            int(loop.extent),
            group,
            values[1],
            _Place(store.buffer, s),
            _Place(data.source, a),
            _Place(weights.source, b),
        )

    def write(self, dot: Dot) -> tirx.Stmt:
        """Return the loop with an instruction of `dot` for each vector, or without one if it does not fit."""
        value = _INTERLEAVED.get(dot.name)
        dtypes = (self.data.dtype, self.weights.dtype)
        whole = self.group == dot.group and self.lanes % max(dot.lanes, 8) == 0
        if value is None or not whole or dtypes != (dot.data, "int8"):
            return self.sums.store(0, self._plain())
        stores = []
        for first in range(0, self.lanes, dot.lanes):
            old = self.sums.load(first, dot.lanes)
            weights = self.weights.load(first * self.group, dot.lanes * self.group)
            operands = old, value(self, first, dot.lanes), weights
            stores.append(self.sums.store(first, instruction(dot.name, f"int32x{dot.lanes}", *operands)))
        return stores[0] if len(stores) == 1 else tirx.SeqStmt(stores)

    def rows(self, first: int, lanes: int) -> list[tirx.Expr]:
        """Return the data of some lanes: a vector for each row."""
        return [self.data.load(g * self.row + first, lanes) for g in range(self.group)]

    def _plain(self) -> tirx.Expr:
        """Return the sums of all lanes, in arithmetic that any processor has."""
        total = self.sums.load(0, self.lanes)
        for g, row in enumerate(self.rows(0, self.lanes)):
            index = tirx.Ramp(self.weights.at + g, _int(self.group), self.lanes)
            factors = tirx.BufferLoad(self.weights.buffer, [index])
            total = total + row.astype(f"int32x{self.lanes}") * factors.astype(f"int32x{self.lanes}")
        return total


def factors_of(store: tirx.BufferStore) -> tuple[TensorLoad, TensorLoad] | None:
    """Return the two loads of `sums[...] = sums[...] + int32(load) * int32(load)`, else None."""
    value = store.value
    if not isinstance(value, tirx.Add) or not isinstance(value.b, tirx.Mul):
        return None
    loads = [factor.value for factor in (value.b.a, value.b.b) if isinstance(factor, tirx.Cast)]
    if len(loads) < 2 or not all(isinstance(load, TensorLoad) for load in (value.a, *loads)):
        return None
    if str(store.buffer.dtype) != "int32" or not value.a.source.same_as(store.buffer):
        return None
    if any(str(factor.source.dtype) not in _FACTORS for factor in loads):
        return None
    return loads[0], loads[1]


def _int(value: int) -> tirx.Expr:
    return tirx.const(value, "int32")


def _ramp(first: tirx.Expr, lanes: int) -> tirx.Expr:
    return first if lanes == 1 else tirx.Ramp(first, _int(1), lanes)


def _added(loop: _DotLoop, first: int, dot: Dot) -> tirx.Expr:
    """Return sums by an instruction of old sums, data and weights, all as bytes (VPDPBUSD)."""
    operands = (loop.repeated_data(dot.lanes), loop.some_weights(first, dot.lanes))
    return instruction(dot.name, f"int32x{dot.lanes}", loop.sums.load(first, dot.lanes), *operands)


def _turned(loop: _DotLoop, first: int, dot: Dot) -> tirx.Expr:
    """Return sums by an instruction of old sums, weights and data (SDOT by element)."""
    operands = (loop.some_weights(first, dot.lanes), loop.repeated_data(dot.lanes))
    return instruction(dot.name, f"int32x{dot.lanes}", loop.sums.load(first, dot.lanes), *operands)


def _pairs(loop: _DotLoop, first: int, dot: Dot) -> tirx.Expr:
    """Return old sums and the sums of pairs of products of 16-bit integers (PMADDWD)."""
    weights = loop.some_weights(first, dot.lanes).astype(f"int16x{dot.lanes * dot.group}")
    pairs = instruction(dot.name, f"int32x{dot.lanes}", loop.repeated_data(dot.lanes), weights)
    return loop.sums.load(first, dot.lanes) + pairs


def _halves(loop: _DotLoop, first: int, dot: Dot) -> tirx.Expr:
    """Return old sums and the sums of pairs of 16-bit sums of products (SMULL, SMLAL, SADALP)."""

    def half(vector: tirx.Expr, number: int) -> tirx.Expr:
        part = tirx.Shuffle([vector], [_int(8 * number + k) for k in range(8)])
        return part.astype("int16x8")

    terms: list[tirx.Expr] = []
    for four in range(0, loop.group, 4):
        word = tirx.reinterpret("int32", loop.data.load(four, 4))
        pairs = tirx.reinterpret("int16x8", tirx.Broadcast(word, 4))
        repeated = tirx.reinterpret("int8x16", tirx.Shuffle([pairs], [_int(k // 4) for k in range(8)]))
        weights = loop.weights.load(first * loop.group + 4 * four, 16)
        terms += [half(weights, number) * half(repeated, number) for number in range(2)]
    products = sum(terms[1:], terms[0])
    return loop.sums.load(first, dot.lanes) + instruction(dot.name, f"int32x{dot.lanes}", products)


_INSTRUCTIONS: Final[Mapping[str, Callable[[_DotLoop, int, Dot], tirx.Expr]]] = {
    "x86.avx512.vpdpbusd.512": _added,
    "x86.avx512.vpdpbusd.256": _added,
    "x86.avx512.pmaddw.d.512": _pairs,
    "x86.avx2.pmadd.wd": _pairs,
    "x86.sse2.pmadd.wd": _pairs,
    "aarch64.neon.sdot.v4i32.v16i8": _turned,
    "aarch64.neon.saddlp": _halves,
}


def _transposed(loop: _LaneLoop, first: int, lanes: int) -> tirx.Expr:
    """Return the data of some lanes, with the bytes of each adjacent (VPERMD and VPSHUFB, or VPERMB)."""
    size, dtype = 4 * lanes, loop.data.dtype
    if loop.row == lanes:  # the rows are adjacent
        whole = loop.data.load(first, size)
    else:
        whole = tirx.Shuffle(loop.rows(first, lanes), [_int(k) for k in range(size)])
    words = tirx.reinterpret(f"int32x{lanes}", whole)
    order = [lanes // 4 * row + word for word in range(lanes // 4) for row in range(4)]
    near = tirx.reinterpret(f"{dtype}x{size}", tirx.Shuffle([words], [_int(k) for k in order]))
    turned = [16 * part + 4 * row + k for part in range(lanes // 4) for k in range(4) for row in range(4)]
    return tirx.Shuffle([near], [_int(k) for k in turned])


def _zipped(loop: _LaneLoop, first: int, lanes: int) -> tirx.Expr:
    """Return the data of four lanes, with the bytes of each adjacent (ZIP1 and ZIP2)."""
    size = 16 if loop.lanes % 16 == 0 else 8
    rows, inside = loop.rows(first // size * size, size), first % size
    half = inside // 8 * 8
    pairs = [
        tirx.reinterpret(
            "int16x8", tirx.Shuffle(two, [_int(half + k // 2 + k % 2 * size) for k in range(16)])
        )
        for two in (rows[:2], rows[2:])
    ]
    order = [inside % 8 // 4 * lanes + k // 2 + k % 2 * 8 for k in range(8)]
    return tirx.reinterpret("int8x16", tirx.Shuffle(pairs, [_int(k) for k in order]))


# Instruction -> what makes the bytes of each lane adjacent. All take sums, data and weights, in this order.
_INTERLEAVED: Final[Mapping[str, Callable[[_LaneLoop, int, int], tirx.Expr]]] = {
    "x86.avx512.vpdpbusd.512": _transposed,
    "x86.avx512.vpdpbusd.256": _transposed,
    "aarch64.neon.sdot.v4i32.v16i8": _zipped,
}

_LOOPS: Final[Mapping[str, type[_DotLoop] | type[_LaneLoop]]] = {DOT_MARK: _DotLoop, LANES_MARK: _LaneLoop}
