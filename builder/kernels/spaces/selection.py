"""`topk` of a small part of an axis: one pass, which keeps the best so far in order.

An element is compared with the last of those that are kept. Only one that precedes it is put in its place
among them. So n elements take n comparisons, and in random order about k log(n / k) of them are moved in. The
worst order takes n * k moves, no more than ranking all elements (`sorting`) if k is a sixteenth of them.

Of equal elements, the one with the lower index comes first, as in `sorting`.
"""

from __future__ import annotations

import math
from typing import Any, Final

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import NEVER_FUSED

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "selection"
_PART: Final = 16
# Moves in the worst order: about a tenth of a second on a small board.
_MOST_MOVES: Final = 1 << 26


def applies(extent: int, count: int) -> bool:
    """Whether `count` of `extent` elements are few enough."""
    return 0 < count * _PART <= extent and count * extent <= _MOST_MOVES


def emit(
    bb: relax.BlockBuilder, x: relax.Expr, axis: int, count: int, *, largest: bool, dtype: str
) -> tuple[relax.Expr, relax.Expr]:
    """Emit the first `count` elements of an axis in sorted order, and their indices.

    Parameters
    ----------
    bb
        Receives the calls.
    x
        The tensor.
    axis
        The axis; a negative one counts from the end.
    count
        How many elements, so few that `applies` is true.
    largest
        Whether the largest come first.
    dtype
        Of the indices.
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
    both = bb.emit(bb.call_te(compute, x, primfunc_name_hint="topk", primfunc_attrs=attrs))
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
    dtype = str(indices.dtype)

    def precedes(one: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
        return one > other if largest else one < other

    def insert(row: tirx.Expr, place: tirx.Expr, end: tirx.Expr | int) -> None:
        """Put an element among those kept before `end`, whose one at `end` is lost."""
        at = ir.buffer_proxy(ir.alloc_buffer((1,), "int32", scope="local"))
        item = ir.buffer_proxy(ir.alloc_buffer((1,), data.dtype, scope="local"))
        item[0], at[0] = _load(x, row, place, extent, inner), end

        def before() -> Any:  # noqa: ANN401 - TVM's proxies
            return _load(kept, row, tirx.max(at[0] - 1, 0), count, inner)

        with ir.While(tirx.all(at[0] > 0, precedes(item[0], before()))):
            place_of = _at(row, at[0], count, inner)
            kept[place_of] = before()
            order[place_of] = order[_at(row, at[0] - 1, count, inner)]
            at[0] = at[0] - 1
        kept[_at(row, at[0], count, inner)] = item[0]
        order[_at(row, at[0], count, inner)] = place.astype(dtype)

    with IRBuilder() as builder, ir.seq_scope(), ir.parallel(0, outer * inner) as row:
        with ir.serial(0, count) as place:
            insert(row, place, place)
        with ir.serial(count, extent) as place:
            last = kept[_at(row, tirx.const(count - 1, "int32"), count, inner)]
            with ir.If(precedes(_load(x, row, place, extent, inner), last)), ir.Then():
                insert(row, place, tirx.const(count - 1, "int32"))
    return builder.get()


def _at(row: tirx.Expr, place: tirx.Expr, extent: int, inner: int) -> tirx.Expr:
    """Return where a place of a row is in a buffer `[outer, extent, inner]`."""
    return (row // inner * extent + place) * inner + row % inner


def _load(buffer: Any, row: tirx.Expr, place: tirx.Expr, extent: int, inner: int) -> tirx.Expr:  # noqa: ANN401
    return buffer[_at(row, place, extent, inner)]
