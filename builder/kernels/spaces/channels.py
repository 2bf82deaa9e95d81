"""Channels that are taken from packed tensors in any order: slices, shuffles and concatenations.

Each vector of the result is put together from vectors of the sources: a load for each source vector that it
takes lanes from, and a shuffle to join it to those before. Nothing depends on the number of pixels, so the
loops run over pixels and the vectors are written out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.epilogue import NEVER_FUSED

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "channels"
# Enough for the cores of a small board, and so few that a job copies more than it costs to hand it out.
_JOBS: Final = 8
_WORTH_A_LAUNCH: Final = 1 << 15  # elements
# More vectors than the largest shuffle of a network has; a kernel of so many is 50 KB of code.
MOST_VECTORS: Final = 4096

Index: TypeAlias = "tirx.Expr | int"
Pick = tuple[int, int]  # the number of a source, and a channel of it, counting padding


def emit(
    bb: relax.BlockBuilder, sources: Sequence[relax.Expr], picks: Sequence[Pick], block: int
) -> relax.Expr:
    """Emit a tensor whose channels are channels of `sources`.

    Parameters
    ----------
    bb
        Receives the call.
    sources
        Tensors `[N, blocks, H, W, b]`; their blocks may differ.
    picks
        For each channel of the result, where it comes from.
    block
        The block of the result, whose last one is completed with zeros.

    Returns
    -------
    relax.Expr
        A tensor `[N, ceil(len(picks) / block), H, W, block]`.
    """
    n, _, h, w, _ = shape_of(sources[0])
    shape = (n, -(-len(picks) // block), h, w, block)
    dtype = str(sources[0].ty.dtype)

    def compute(*tensors: te.Tensor) -> te.Tensor:
        return te.extern(
            [shape],
            list(tensors),
            lambda ins, outs: _loops(shape, [shape_of(source) for source in sources], picks, ins, outs[0]),
            name=KIND,
            dtype=[dtype],
            in_buffers=[tirx.decl_buffer(tensor.shape, dtype) for tensor in tensors],
            out_buffers=[tirx.decl_buffer(shape, dtype)],
        )

    attrs = {"edge.written": KIND, **NEVER_FUSED}
    return bb.emit(bb.call_te(compute, *sources, primfunc_name_hint="channels", primfunc_attrs=attrs))


def vectors(picks: Sequence[Pick], block: int, blocks: Sequence[int]) -> int:
    """Return how many vectors of the sources are loaded for one pixel.

    Parameters
    ----------
    picks, block
        As for `emit`.
    blocks
        The block of each source.
    """
    parts = [picks[first : first + block] for first in range(0, len(picks), block)]
    return sum(len({(source, channel // blocks[source]) for source, channel in part}) for part in parts)


def _loops(
    shape: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    picks: Sequence[Pick],
    ins: Sequence[tirx.Buffer],
    out: tirx.Buffer,
) -> tirx.Stmt:
    """Return the loops: pixels of a job, for each block of channels."""
    batch, blocks, rows, columns, block = shape
    target, tensors = ir.buffer_proxy(out), [ir.buffer_proxy(buffer) for buffer in ins]
    jobs = min(_JOBS, rows) if math.prod(shape) >= _WORTH_A_LAUNCH else 1
    share = -(-rows // jobs)
    one = tirx.const(1, "int32")

    def vector(picked: Sequence[Pick], image: Index, row: Index, column: Index) -> tirx.Expr:
        """Return a vector with the picked channels of a pixel."""
        moves: dict[Pick, list[tuple[int, int]]] = {}
        for lane, (source, channel) in enumerate(picked):
            place, other = divmod(channel, shapes[source][4])
            moves.setdefault((source, place), []).append((lane, other))
        widths = [shapes[source][4] for source, _ in moves]
        zeros = len(picked) < block or widths[0] < block
        value = tirx.Broadcast(tirx.const(0, out.dtype), block) if zeros else None
        for ((source, place), lanes), width in zip(moves.items(), widths, strict=True):
            loaded = tensors[source][image, place, row, column, tirx.Ramp(tirx.const(0, "int32"), one, width)]
            # The lanes of `loaded` come first, then those of `value`; what no source has set yet is not read.
            order = [0] * block if value is None else list(range(width, width + block))
            for lane, other in lanes:
                order[lane] = other
            whole = value is None and order == list(range(width))
            value = loaded if whole else tirx.Shuffle([loaded] if value is None else [loaded, value], order)
        assert value is not None
        return value

    with IRBuilder() as builder, ir.seq_scope(), ir.parallel(0, jobs) as job, ir.serial(0, batch) as image:
        begin = job * share
        count = tirx.max(tirx.min(share, rows - begin), 0) if rows % jobs else share
        for number in range(blocks):
            picked = picks[number * block : (number + 1) * block]
            with ir.serial(0, count) as step, ir.serial(0, columns) as column:
                lanes = tirx.Ramp(tirx.const(0, "int32"), one, block)
                value = vector(picked, image, begin + step, column)
                target[image, number, begin + step, column, lanes] = value
    return builder.get()
