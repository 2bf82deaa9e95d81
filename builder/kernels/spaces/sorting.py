"""`sort`, `argsort` and `topk`, by the rank of each element; `selection` does most of `topk`.

An element's rank is the number of elements that precede it; of equal elements, the one with the lower index
comes first. So the order is the same on every device. A rank takes n comparisons, without branches and in
full vectors; a merge sort would wait for each of its loads. A thousand classes take less than a millisecond.
The time grows with the square of the extent, hence `MAX_EXTENT`. TVM's own sort is a function of its runtime,
which devices do not have. NaN counts as infinity: compared with itself, it would share its rank with others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces import selection
from builder.kernels.spaces.epilogue import NEVER_FUSED

# An axis of this extent takes about a second on a small board. A longer one is not legalised here, and code
# generation refuses it.
MAX_EXTENT: Final = selection.MAX_SORTED

Index = tuple[tirx.Expr, ...]


def topk(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `topk`: the k largest or smallest elements along an axis, in order, their indices, or both."""
    attrs, (x,) = call.attrs, call.args
    if selection.applies(shape_of(x)[int(attrs.axis)], int(attrs.k)):
        count, dtype, largest = int(attrs.k), str(attrs.dtype), bool(attrs.largest)
        values, indices = selection.emit(bb, x, int(attrs.axis), count, largest=largest, dtype=dtype)
        return {"values": values, "indices": indices}.get(str(attrs.ret_type), relax.Tuple([values, indices]))
    if _too_long(call):
        return call
    ordered = _Ordered(bb, x, int(attrs.axis), descending=bool(attrs.largest), count=int(attrs.k))
    if attrs.ret_type == "values":
        return ordered.values()
    if attrs.ret_type == "indices":
        return ordered.indices(str(attrs.dtype))
    return relax.Tuple([ordered.values(), ordered.indices(str(attrs.dtype))])


def sort(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `sort`: all elements along an axis, in order."""
    if _too_long(call):
        return call
    return _Ordered(bb, call.args[0], int(call.attrs.axis), descending=bool(call.attrs.descending)).values()


def argsort(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise `argsort`: the indices that sort an axis."""
    if _too_long(call):
        return call
    attrs = call.attrs
    ordered = _Ordered(bb, call.args[0], int(attrs.axis), descending=bool(attrs.descending))
    return ordered.indices(str(attrs.dtype))


def _too_long(call: Call) -> bool:
    return shape_of(call.args[0])[int(call.attrs.axis)] > MAX_EXTENT


def _keys(bb: relax.BlockBuilder, x: relax.Expr) -> relax.Expr:
    """Return what is compared of real numbers; not fused into the comparisons, which read it many times."""
    infinity = tirx.const(math.inf, str(x.ty.dtype))

    def compute(x: te.Tensor) -> te.Tensor:
        def key(*i: tirx.Var) -> tirx.Expr:
            return tirx.Select(tirx.isnan(x(*i)), infinity, x(*i))

        return te.compute(x.shape, key, name="keys")

    return bb.call_te(compute, x, primfunc_name_hint="keys", primfunc_attrs=NEVER_FUSED)


class _Ordered:
    """The first `count` elements along an axis in sorted order.

    `descending`: put the largest first.
    `count`: how many elements; 0 for all.
    """

    def __init__(
        self, bb: relax.BlockBuilder, x: relax.Expr, axis: int, *, descending: bool, count: int = 0
    ) -> None:
        self._bb = bb
        self._x = x
        self._shape = shape_of(x)
        self._axis = axis % len(self._shape)
        extent = self._shape[self._axis]
        self._count = min(count, extent) if count > 0 else extent
        keys = x if np.dtype(str(x.ty.dtype)).kind != "f" else bb.emit(_keys(bb, x))
        self._ranks = bb.emit(
            bb.call_te(lambda x: self._rank(x, descending), keys, primfunc_name_hint="rank")
        )

    def values(self) -> relax.Var:
        """Emit the elements."""
        return self._pick("ordered", lambda x, at, j: x[self._with(at, j)], str(self._x.ty.dtype))

    def indices(self, dtype: str) -> relax.Var:
        """Emit their indices along the axis."""
        return self._pick("order", lambda _x, _at, j: tirx.Cast(dtype, j), dtype)

    def _rank(self, x: te.Tensor, descending: bool) -> te.Tensor:
        other = te.reduce_axis((0, self._shape[self._axis]), name="other")

        def rank(*at: tirx.Var) -> tirx.Expr:
            own, theirs = x[at], x[self._with(at, other.var)]
            before = theirs > own if descending else theirs < own
            tied = tirx.all(theirs == own, other.var < at[self._axis])
            return te.sum(tirx.Select(tirx.any(before, tied), 1, 0), axis=other)

        return te.compute(tuple(self._shape), rank, name="rank")

    def _pick(
        self, name: str, what: Callable[[te.Tensor, Index, tirx.Var], tirx.Expr], dtype: str
    ) -> relax.Var:
        """Emit `what` of the element of each rank: a sum over the axis, in which one term is not zero."""

        def compute(x: te.Tensor, ranks: te.Tensor) -> te.Tensor:
            source = te.reduce_axis((0, self._shape[self._axis]), name="source")

            def pick(*at: tirx.Var) -> tirx.Expr:
                mine = ranks[self._with(at, source.var)] == at[self._axis]
                value = what(x, at, source.var)
                return te.sum(tirx.Select(mine, value, tirx.const(0, dtype)), axis=source)

            return te.compute(self._with(tuple(self._shape), self._count), pick, name=name)

        return self._bb.emit(self._bb.call_te(compute, self._x, self._ranks, primfunc_name_hint=name))

    def _with(self, at: Index, value: tirx.Expr | int) -> Index:
        """Return an index or a shape with `value` on the axis."""
        return (*at[: self._axis], value, *at[self._axis + 1 :])
