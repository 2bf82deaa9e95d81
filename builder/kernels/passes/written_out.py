"""How large the expression of an element becomes when the calls of a kernel are written into each other.

TVM's passes walk over that expression many times, and over an index in it once for each of its parts. A pad
that reflects writes the place of an element nine times, so two of them 81 times; a cubic resize reads 16
elements, so two of them 256. TVM proves things about each choice (`Where`) under the conditions of those
around it: three chained ones, each of a value and of what follows from it, are 13 choices; four are 40, and
take seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.ir import Call, Expr, TensorLoad

# Kernels of networks have up to a thousand, a cubic resize 2800, two 110 000.
MOST_NODES: Final = 20_000
# Of one index. A pad that reflects has 40.
MOST_INDEX_NODES: Final = 300
# Kernels of networks have up to 10.
MOST_CHOICES: Final = 32
_IF_THEN_ELSE: Final = "prim.if_then_else"


@dataclass(frozen=True, slots=True)
class WrittenOut:
    """An expression of an element's place.

    `places`: how often it has the place along each axis.
    `index`: the nodes of its largest index.
    `index_places`: how often that index has the place along each axis.
    """

    nodes: int
    places: tuple[int, ...]
    index: int = 0
    index_places: tuple[int, ...] = ()
    choices: int = 0

    @property
    def fits(self) -> bool:
        """Whether a kernel may have such an expression."""
        limits = ((self.nodes, MOST_NODES), (self.index, MOST_INDEX_NODES), (self.choices, MOST_CHOICES))
        return all(number <= most for number, most in limits)


@dataclass(frozen=True, slots=True)
class _Load:
    """What a function reads.

    `nodes`: the nodes of the index along each axis.
    `places`: for each of these, how often it has the place along each axis of the result.
    """

    source: tirx.Buffer
    nodes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class _Store:
    """A block that computes elements one by one: where to, its nodes, places and choices, what it reads."""

    to: tirx.Buffer
    nodes: int
    places: tuple[int, ...]
    choices: int
    loads: tuple[_Load, ...]

    def written_out(self, known: Mapping[tirx.Buffer, WrittenOut]) -> WrittenOut:
        """Return the expression of an element if those of the buffers `known` are written into it."""
        nodes, places = self.nodes, list(self.places)
        index, index_places, choices = 0, self.places, self.choices
        for load in self.loads:
            size = known.get(load.source, _element(len(load.nodes)))
            choices += size.choices
            nodes += size.nodes + sum(p * n for p, n in zip(size.places, load.nodes, strict=True))
            for axis, inner in enumerate(zip(*load.places, strict=True)):
                places[axis] += sum(p * n for p, n in zip(size.places, inner, strict=True))
            larger = size.index + sum(p * n for p, n in zip(size.index_places, load.nodes, strict=True))
            if larger > index:
                found = zip(*load.places, strict=True)
                index = larger
                index_places = tuple(
                    sum(p * n for p, n in zip(size.index_places, inner, strict=True)) for inner in found
                )
        return WrittenOut(nodes, tuple(places), index, index_places, choices)


def _element(rank: int) -> WrittenOut:
    """Return an element in memory."""
    return WrittenOut(1, (1,) * rank, 0, (1,) * rank)


class Body:
    """What a function computes for an element of its result.

    `func`: the function. If it does more than compute elements one by one, it has no size.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self._params = list(func.params)
        blocks: list[st.SBlock] = []
        tvm_ffi.structural_walk(func.body, (st.SBlock, blocks.append))
        self._stores = [_store(block) for block in blocks if isinstance(block.body, tirx.BufferStore)]

    def written_out(self, operands: Sequence[WrittenOut | None]) -> WrittenOut | None:
        """Return the expression of an element; `operands` are those of what is written into it."""
        found = zip(self._params, operands, strict=False)
        known = {param: size for param, size in found if size is not None}
        result = None
        for store in self._stores:
            result = known[store.to] = store.written_out(known)
        return result


def _store(block: st.SBlock) -> _Store:
    store = block.body
    # The block of a scalar has an axis of length 1, which no index names.
    axes = [axis.var for axis in block.iter_vars] if store.indices else []
    own, places = _count(store.value, axes)
    found: list[TensorLoad] = []
    tvm_ffi.structural_walk(store.value, (TensorLoad, found.append))
    loads = []
    for load in found:
        counts = [_count(index, axes) for index in load.indices]
        # They are counted with what is read.
        own -= 1 + sum(nodes for nodes, _ in counts)
        places = tuple(n - sum(p[axis] for _, p in counts) for axis, n in enumerate(places))
        loads.append(_Load(load.source, tuple(n for n, _ in counts), tuple(p for _, p in counts)))
    return _Store(
        store.buffer, max(0, own), tuple(max(0, n) for n in places), _choices(store.value), tuple(loads)
    )


def _count(expr: tirx.Expr, axes: Sequence[tirx.Var]) -> tuple[int, tuple[int, ...]]:
    """Return the nodes of an expression, and how often it has each of `axes`."""
    nodes: list[Expr] = []
    tvm_ffi.structural_walk(expr, (Expr, nodes.append))
    return len(nodes), tuple(sum(node.same_as(axis) for node in nodes) for axis in axes)


def _choices(expr: tirx.Expr) -> int:
    """Return how many values of an expression depend on a condition."""
    nodes: list[Expr] = []
    tvm_ffi.structural_walk(expr, (Expr, nodes.append))
    return sum(
        isinstance(node, tirx.Select)
        or (isinstance(node, Call) and getattr(node.op, "name", "") == _IF_THEN_ELSE)
        for node in nodes
    )
