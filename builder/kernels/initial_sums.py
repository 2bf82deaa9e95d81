"""Sums that start from the bias instead of from zero.

A tile of accumulators is set to zero, products are added to it, and then the epilogue adds the bias. If the
tile starts from the bias, the epilogue has an addition less for each vector of results. A layer of few input
channels takes only 20 to 50 instructions for one.

A bias is an argument of the kernel with fewer elements than there are sums. A residual stays in the epilogue:
products that are added to a large number one by one lose more digits than their sum does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import s_tir as st
from tvm import tirx
from tvm.ir import Range, TensorLoad, TensorRegion
from tvm_ffi import structural_equal

from builder.kernels.spaces.tile_loops import ZEROS_MARK


@dataclass(frozen=True, slots=True)
class _Sums:
    """A buffer of sums, and the blocks that start and read it.

    `zeros`: the block that sets its elements to zero.
    `epilogue`: the only block that reads them, besides the one that adds to them.
    `at`: the indices at which `epilogue` reads: variables of that block.
    """

    buffer: tirx.Buffer
    zeros: st.SBlock
    epilogue: st.SBlock
    at: tuple[tirx.Var, ...]

    @classmethod
    def find(cls, blocks: Sequence[st.SBlock]) -> list[_Sums]:
        """Return all buffers of sums among the blocks of a function."""
        found = []
        for zeros in blocks:
            store = zeros.body
            if not isinstance(store, tirx.BufferStore) or not _is_zero(store.value):
                continue
            others = [block for block in blocks if not block.same_as(zeros)]
            writers = [block for block in others if _stores(block, store.buffer)]
            readers = [block for block in others if _loads(block, store.buffer) and block not in writers]
            if len(writers) != 1 or len(readers) != 1 or not _accumulates(writers[0], store.buffer):
                continue
            at = _place(readers[0], store.buffer)
            if at is not None:
                found.append(cls(store.buffer, zeros, readers[0], at))
        return found

    def without_bias(self, arguments: Sequence[tirx.Buffer]) -> tuple[tirx.Stmt, TensorLoad] | None:
        """Return the epilogue's body without the bias, and the bias; None if there is none to move.

        `arguments`: those that the kernel only reads: other tensors may not be computed before the sums.
        """
        found: list[tuple[tirx.Add, TensorLoad]] = []

        def look(add: tirx.Add) -> None:
            for one, other in ((add.a, add.b), (add.b, add.a)):
                if self._is_sum(one) and self._is_bias(other, arguments):
                    found.append((add, other))

        tvm_ffi.structural_walk(self.epilogue.body, (tirx.Add, look))
        same = [add for add, _ in found if structural_equal(add, found[0][0])]
        if not found or len(same) != len(_loads(self.epilogue, self.buffer)):
            return None  # the sums are also needed without the bias

        def without(add: tirx.Add) -> tirx.Expr:
            if not structural_equal(add, same[0]):
                return add
            return add.a if self._is_sum(add.a) else add.b

        return tvm_ffi.structural_map(self.epilogue.body, (tirx.Add, without)), found[0][1]

    def _is_sum(self, value: tirx.Expr) -> bool:
        return isinstance(value, TensorLoad) and value.source.same_as(self.buffer)

    def _is_bias(self, value: tirx.Expr, arguments: Sequence[tirx.Buffer]) -> bool:
        """Whether `value` is an element of an argument that several sums have in common."""
        if not isinstance(value, TensorLoad) or str(value.source.dtype) != str(self.buffer.dtype):
            return False
        if not any(value.source.same_as(argument) for argument in arguments):
            return False
        shape = [int(n) for n in value.source.shape]
        is_shared = math.prod(shape) < math.prod(int(n) for n in self.buffer.shape)
        return is_shared and all(map(self._covers, value.indices, shape))

    def _covers(self, index: tirx.Expr, extent: int) -> bool:
        """Whether all values of an index of the bias are less than `extent`, for each of the sums."""
        if isinstance(index, tirx.IntImm):
            return True
        return any(
            index.same_as(var) and int(size) <= extent
            for var, size in zip(self.at, self.buffer.shape, strict=True)
        )


def start_from_bias(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a scheduled function whose sums start from the bias that its epilogue adds to them.

    `func`: a function made of blocks, whose reductions are decomposed.
    """
    loops: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    if any(ZEROS_MARK in loop.annotations for loop in loops):
        return func  # sums in tile registers start from zero
    blocks: list[st.SBlock] = []
    tvm_ffi.structural_walk(func.body, (st.SBlock, blocks.append))
    leaves = [block for block in blocks if isinstance(block.body, tirx.BufferStore)]
    # A buffer that the kernel writes is not a bias: its value is different when the sums start.
    inputs = [p for p in func.params if not any(_stores(block, p) for block in leaves)]
    for sums in _Sums.find(leaves):
        found = sums.without_bias(inputs)
        if found is not None:
            func = func.with_body(tvm_ffi.structural_map(func.body, (st.SBlock, _change(sums, *found))))
    return func


def _change(sums: _Sums, body: tirx.Stmt, bias: TensorLoad) -> Callable[[st.SBlock], st.SBlock]:
    """Return a function that changes the two blocks of `sums`: the epilogue gets `body`."""
    place = sums.zeros.body.indices
    values = dict(zip(sums.at, place, strict=True))
    first = tirx.BufferLoad(bias.source, [values.get(i, i) for i in bias.indices])
    ranges = [Range.from_min_extent(i, tirx.const(1, str(i.ty.dtype))) for i in first.indices]
    ty = next(region.ty for region in sums.epilogue.reads if region.source.same_as(bias.source))
    used: list[TensorLoad] = []
    tvm_ffi.structural_walk(body, (TensorLoad, used.append))

    def change(block: st.SBlock) -> st.SBlock:
        if block.same_as(sums.zeros):
            start = tirx.BufferStore(sums.buffer, first, place)
            return _with(block, start, [TensorRegion(bias.source, ranges, ty)])
        if block.same_as(sums.epilogue):
            reads = [r for r in block.reads if any(r.source.same_as(load.source) for load in used)]
            return _with(block, body, reads)
        return block

    return change


def _with(block: st.SBlock, body: tirx.Stmt, reads: Sequence[TensorRegion]) -> st.SBlock:
    """Return a block with another body, and the regions that it reads."""
    return st.SBlock(
        block.iter_vars, list(reads), block.writes, block.name_hint, body, None, block.alloc_buffers,
        block.match_buffers, block.annotations,
    )  # fmt: skip


def _is_zero(value: tirx.Expr) -> bool:
    return isinstance(value, (tirx.IntImm, tirx.FloatImm)) and float(value.value) == 0.0


def _loads(block: st.SBlock, buffer: tirx.Buffer) -> list[TensorLoad]:
    """Return the reads of `buffer` in a block."""
    loads: list[TensorLoad] = []
    tvm_ffi.structural_walk(block.body, (TensorLoad, loads.append))
    return [load for load in loads if load.source.same_as(buffer)]


def _stores(block: st.SBlock, buffer: tirx.Buffer) -> bool:
    """Whether a block writes `buffer`."""
    return bool(block.body.buffer.same_as(buffer))


def _accumulates(block: st.SBlock, buffer: tirx.Buffer) -> bool:
    """Whether a block adds to an element of `buffer`, and reads no other."""
    value = block.body.value
    if not isinstance(value, tirx.Add) or len(_loads(block, buffer)) != 1:
        return False
    sums = [
        part for part in (value.a, value.b) if isinstance(part, TensorLoad) and part.source.same_as(buffer)
    ]
    return len(sums) == 1 and structural_equal(list(sums[0].indices), list(block.body.indices))


def _place(block: st.SBlock, buffer: tirx.Buffer) -> tuple[tirx.Var, ...] | None:
    """Return the indices at which a block reads `buffer`; None unless they are different variables, once."""
    places = [tuple(load.indices) for load in _loads(block, buffer)]
    own = [var.var for var in block.iter_vars]
    first = places[0]
    if not all(any(index.same_as(var) for var in own) for index in first):
        return None
    if any(a.same_as(b) for n, a in enumerate(first) for b in first[:n]):
        return None
    if any(not a.same_as(b) for place in places[1:] for a, b in zip(place, first, strict=True)):
        return None
    return first
