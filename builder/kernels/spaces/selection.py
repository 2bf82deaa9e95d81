"""`topk` by selection: one pass keeps the best elements so far in a heap, and then orders them.

The worst element that is kept is at the top, so most elements need one comparison. An element that is better
replaces it, and sinks to its place. So n elements take at most n log k moves, in any order.

Of equal elements, the one with the lower index comes first, as in `sorting`.
"""

from __future__ import annotations

import math
from typing import Any, Final

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import NEVER_FUSED, emit_kernel

# The kernel's loops are written out, not scheduled: this names where they come from.
KIND: Final = "selection"
# An axis of at most this extent may be sorted as a whole; of a longer one, at most a 16th is selected.
MAX_SORTED: Final = 1 << 15
_PART: Final = 16
_LONGEST: Final = 1 << 24
# Fewer elements are ranked (`sorting`), which is faster: it compares whole vectors of them.
_FEWEST: Final = 512


def applies(extent: int, count: int) -> bool:
    """Whether `count` elements are selected from `extent`."""
    if count * _PART <= extent:
        return 0 < extent <= _LONGEST and count > 0
    return _FEWEST <= extent <= MAX_SORTED and 0 < count <= extent


def emit(
    bb: relax.BlockBuilder, x: relax.Expr, axis: int, count: int, *, largest: bool, dtype: str
) -> tuple[relax.Expr, relax.Expr]:
    """Emit the first `count` elements of an axis in sorted order, and their indices.

    `axis`: the axis; a negative one counts from the end.
    `largest`: whether the largest come first.
    """
    shape = shape_of(x)
    axis %= len(shape)
    result = (*shape[:axis], count, *shape[axis + 1 :])
    sizes = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]), count)
    dtypes = [str(x.ty.dtype), dtype]

    def compute(data: te.Tensor) -> list[te.Tensor]:
        made: list[te.Tensor] = te.extern(
            [result, result],
            [data],
            lambda ins, outs: _write(sizes, ins[0], outs[0], outs[1], largest=largest),
            name=KIND,
            dtype=dtypes,
            in_buffers=[tirx.decl_buffer(data.shape, data.dtype)],
            out_buffers=[tirx.decl_buffer(result, each) for each in dtypes],
        )
        return made

    attrs = {"edge.written": KIND, **NEVER_FUSED}
    both = emit_kernel(bb, "topk", compute, x, attrs=attrs)
    return bb.emit(relax.TupleGetItem(both, 0)), bb.emit(relax.TupleGetItem(both, 1))


def _write(
    sizes: tuple[int, int, int, int],
    data: tirx.Buffer,
    values: tirx.Buffer,
    indices: tirx.Buffer,
    *,
    largest: bool,
) -> tirx.Stmt:
    """Return the loops over the rows of `data`, `[outer, extent, inner]`, of which `count` are kept."""
    outer, extent, inner, count = sizes
    x, kept, order = (ir.buffer_proxy(buffer) for buffer in (data, values, indices))
    heap = _Heap(kept, order, count, inner, (str(data.dtype), str(indices.dtype)), largest=largest)
    with IRBuilder() as builder, ir.seq_scope(), ir.parallel(0, outer * inner) as row:
        with ir.serial(0, count) as place:
            kept[_at(row, place, count, inner)] = x[_at(row, place, extent, inner)]
            order[_at(row, place, count, inner)] = place.astype(str(indices.dtype))
        with ir.serial(0, count // 2) as step:
            heap.sink(row, count // 2 - 1 - step, _number(count))
        with ir.serial(count, extent) as place:
            value = x[_at(row, place, extent, inner)]
            worst = kept[_at(row, _number(0), count, inner)]
            with ir.If(value > worst if largest else value < worst), ir.Then():
                kept[_at(row, _number(0), count, inner)] = value
                order[_at(row, _number(0), count, inner)] = place.astype(str(indices.dtype))
                heap.sink(row, _number(0), _number(count))
        with ir.serial(0, count - 1) as step:
            heap.swap(row, _number(0), count - 1 - step)
            heap.sink(row, _number(0), count - 1 - step)
    return builder.get()


class _Heap:
    """The kept elements of each row, and their indices; each precedes the elements above it.

    `kept`, `order`: proxies of the buffers `[outer, count, inner]`.
    """

    def __init__(
        self,
        kept: Any,  # noqa: ANN401 - TVM's proxies
        order: Any,  # noqa: ANN401
        count: int,
        inner: int,
        dtypes: tuple[str, str],
        *,
        largest: bool,
    ) -> None:
        self._kept, self._order = kept, order
        self._count, self._inner = count, inner
        self._dtypes, self._largest = dtypes, largest

    def _precedes(self, row: tirx.Expr, one: tirx.Expr, value: tirx.Expr, index: tirx.Expr) -> tirx.Expr:
        """Whether the element at a place comes before another one."""
        at = _at(row, one, self._count, self._inner)
        own = self._kept[at]
        before = own > value if self._largest else own < value
        return tirx.any(before, tirx.all(own == value, self._order[at] < index))

    def swap(self, row: tirx.Expr, one: tirx.Expr, other: tirx.Expr) -> None:
        """Exchange two elements."""
        first, second = (_at(row, place, self._count, self._inner) for place in (one, other))
        for buffer, dtype in zip((self._kept, self._order), self._dtypes, strict=True):
            held = _local(dtype)
            held[0] = buffer[first]
            buffer[first] = buffer[second]
            buffer[second] = held[0]

    def sink(self, row: tirx.Expr, start: tirx.Expr, size: tirx.Expr) -> None:
        """Let an element sink below all that it precedes, among the first `size`."""
        at, child, going = _local("int32"), _local("int32"), _local("int32")
        item, number = (_local(dtype) for dtype in self._dtypes)
        kept, order = self._kept, self._order
        at[0], going[0] = start, 1

        def here(place: tirx.Expr) -> tirx.Expr:
            return _at(row, place, self._count, self._inner)

        item[0], number[0] = kept[here(at[0])], order[here(at[0])]
        with ir.While(tirx.all(going[0] != 0, at[0] * 2 + 1 < size)):
            child[0] = at[0] * 2 + 1
            with ir.If(child[0] + 1 < size), ir.Then():
                right = here(child[0] + 1)
                with ir.If(self._precedes(row, child[0], kept[right], order[right])), ir.Then():
                    child[0] = child[0] + 1
            with ir.If(self._precedes(row, child[0], item[0], number[0])):
                with ir.Then():
                    going[0] = 0
                with ir.Else():
                    kept[here(at[0])] = kept[here(child[0])]
                    order[here(at[0])] = order[here(child[0])]
                    at[0] = child[0]
        kept[here(at[0])] = item[0]
        order[here(at[0])] = number[0]


def _local(dtype: str) -> Any:  # noqa: ANN401 - TVM's proxies
    return ir.buffer_proxy(ir.alloc_buffer((1,), dtype, scope="local"))


def _number(value: int) -> tirx.Expr:
    return tirx.const(value, "int32")


def _at(row: tirx.Expr, place: tirx.Expr, extent: int, inner: int) -> tirx.Expr:
    """Return where a place of a row is in a buffer `[outer, extent, inner]`."""
    return (row // inner * extent + place) * inner + row % inner
