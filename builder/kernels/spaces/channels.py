"""Channels that are taken from packed tensors in any order: slices, shuffles, concatenations, larger images.

Each vector of the result is put together from vectors of the sources: a load for each source vector that it
takes lanes from, and a shuffle to join it to those before. The loops run over pixels. Vectors that are put
together in the same way, from sources that are equally far apart, are one loop (`runs`); the others are
written out. So the code of a concatenation grows with the number of its sources, not with that of channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.concatenation import JOBS, JOINS, WORTH_A_LAUNCH
from builder.kernels.spaces.epilogue import NEVER_FUSED, emit_kernel

# The kernel is written out, not scheduled: this names where its loops come from.
KIND: Final = "channels"
# LLVM's time grows with the square of the loops in a function: so many take it some seconds. Only channels
# that are gathered in no order need more; concatenations and shuffles of networks stay far below.
MOST_LOOPS: Final = 96

Index: TypeAlias = "tirx.Expr | int"
Pick = tuple[int, int]  # the number of a source, and a channel of it, counting padding


@dataclass(frozen=True, slots=True)
class Spread:
    """How channels become pixels: each pixel of the sources becomes `strides` pixels of the result.

    `strides`: rows and columns of the result for each of the sources.
    `cut`: rows above and columns to the left that are left out.
    `extents`: rows and columns of the result.
    """

    strides: tuple[int, int]
    cut: tuple[int, int]
    extents: tuple[int, int]

    def range(self, axis: int, phase: int) -> tuple[int, int]:
        """Return the range, `first, end`, of source pixels whose `phase` is in the result."""
        stride, cut = self.strides[axis], self.cut[axis]
        first, end = (max(0, -(-(edge - phase) // stride)) for edge in (cut, cut + self.extents[axis]))
        return first, end

    @property
    def phases(self) -> list[tuple[int, int]]:
        """The places of the pixels that one pixel becomes, row by row."""
        return [(i, j) for i in range(self.strides[0]) for j in range(self.strides[1])]


def emit(
    bb: relax.BlockBuilder,
    sources: Sequence[relax.Expr],
    picks: Sequence[Sequence[Pick]],
    block: int,
    spread: Spread | None = None,
) -> relax.Expr:
    """Emit a tensor whose channels are channels of `sources`.

    `sources`: tensors `[N, blocks, H, W, b]`; their blocks may differ.
    `picks`: for each of `spread.phases`, where each channel of the result comes from.
    `block`: the block of the result, whose last one is completed with zeros.
    `spread`: how channels become pixels; None if the result has the pixels of the sources.
    Result: a tensor `[N, ceil(channels / block), H, W, block]`, with the rows and columns of `spread`.
    """
    n, _, h, w, _ = shape_of(sources[0])
    spread = spread or Spread((1, 1), (0, 0), (h, w))
    shape = (n, -(-len(picks[0]) // block), *spread.extents, block)
    dtype = str(sources[0].ty.dtype)

    def compute(*tensors: te.Tensor) -> te.Tensor:
        shapes = [shape_of(source) for source in sources]
        return te.extern(
            [shape],
            list(tensors),
            lambda ins, outs: _loops(shape, shapes, picks, spread, ins, outs[0]),
            name=KIND,
            dtype=[dtype],
            in_buffers=[tirx.decl_buffer(tensor.shape, dtype) for tensor in tensors],
            out_buffers=[tirx.decl_buffer(shape, dtype)],
        )

    attrs = {"edge.written": KIND, **NEVER_FUSED}
    if spread.strides == (1, 1) and joins(shape, [shape_of(source) for source in sources], picks[0]):
        attrs[JOINS] = 1
    return emit_kernel(bb, "channels", compute, *sources, attrs=attrs)


def joins(shape: Sequence[int], sources: Sequence[Sequence[int]], picked: Sequence[Pick]) -> bool:
    """Whether a packed result is its sources, one after another in memory.

    `shape`, `sources`: the shapes of the result and its sources, `[N, blocks, H, W, block]`.
    `picked`: where each channel of the result comes from. In the padding of its last block may be anything.
    """
    n, blocks, *pixels = shape
    places = [(i, c) for i, source in enumerate(sources) for c in range(source[1] * source[4])]
    return (
        n == 1
        and all([*source[2:]] == pixels for source in sources)
        and blocks == sum(source[1] for source in sources)
        and places[: len(picked)] == list(picked)
    )


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of the result that are put together in the same way.

    `period`: how many blocks are one round.
    `shifts`: for each block of the first round, each phase, and each source vector in the order of `_moves`:
        how many blocks of its source further the vector of the next round is.
    """

    first: int
    period: int
    rounds: int
    shifts: tuple[tuple[tuple[int, ...], ...], ...]


# A shuffle of two halves repeats after two blocks; closing the gaps of groups of 20 channels after five.
_MOST_PERIOD: Final = 16

_Moves: TypeAlias = "tuple[tuple[Pick, tuple[tuple[int, int], ...]], ...]"


def _moves(picked: Sequence[Pick], blocks: Sequence[int]) -> _Moves:
    """Return the vectors of the sources that make up a vector of the result, and the lanes that each sets.

    A vector is the number of a source and a block of it; lanes are pairs of one of the result and one of the
    source. `blocks` has the block of each source.
    """
    moves: dict[Pick, list[tuple[int, int]]] = {}
    for lane, (source, channel) in enumerate(picked):
        place, other = divmod(channel, blocks[source])
        moves.setdefault((source, place), []).append((lane, other))
    return tuple((key, tuple(lanes)) for key, lanes in moves.items())


def runs(picks: Sequence[Sequence[Pick]], block: int, blocks: Sequence[int]) -> list[Run]:
    """Divide the blocks of a result into runs, each of which saves as many loops as possible.

    `picks`: for each phase, where each channel of the result comes from.
    """
    parts = [
        tuple(_moves(phase[first : first + block], blocks) for phase in picks)
        for first in range(0, len(picks[0]), block)
    ]
    found: list[Run] = []
    first = 0
    while first < len(parts):
        candidates = [_run(parts, first, period) for period in range(1, _MOST_PERIOD + 1)]
        run = max(candidates, key=lambda run: ((run.rounds - 1) * run.period, -run.period))
        found.append(run)
        first += run.period * run.rounds
    return found


def loops(picks: Sequence[Sequence[Pick]], block: int, blocks: Sequence[int]) -> int:
    """Return how many loops over pixels a kernel has; the parameters are those of `runs`."""
    return len(picks) * sum(run.period for run in runs(picks, block, blocks))


def _run(parts: Sequence[tuple[_Moves, ...]], first: int, period: int) -> Run:
    """Return the longest run of a period that begins at a block; if there is none, that block by itself."""
    here, there = parts[first : first + period], parts[first + period : first + 2 * period]
    shifts = tuple(shift for a, b in zip(here, there, strict=False) if (shift := _shift(a, b)) is not None)
    if len(shifts) < period:
        return Run(first, 1, 1, (tuple((0,) * len(moves) for moves in parts[first]),))
    end = first + 2 * period
    while end + period <= len(parts) and all(
        _shift(parts[end - period + k], parts[end + k]) == shifts[k] for k in range(period)
    ):
        end += period
    return Run(first, period, (end - first) // period, shifts)


def _shift(here: tuple[_Moves, ...], there: tuple[_Moves, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return how many blocks each vector of `there` is behind that of `here`; None if more differs."""
    for moves, later in zip(here, there, strict=True):
        if [(source, lanes) for (source, _), lanes in moves] != [
            (source, lanes) for (source, _), lanes in later
        ]:
            return None
    return tuple(
        tuple(after - before for ((_, before), _), ((_, after), _) in zip(moves, later, strict=True))
        for moves, later in zip(here, there, strict=True)
    )


def _loops(
    shape: tuple[int, ...],
    shapes: Sequence[tuple[int, ...]],
    picks: Sequence[Sequence[Pick]],
    spread: Spread,
    ins: Sequence[tirx.Buffer],
    out: tirx.Buffer,
) -> tirx.Stmt:
    """Return the loops: for each run of blocks of channels, the pixels of a job's rows."""
    batch, *_, block = shape
    rows = shapes[0][2]
    blocks = [source[4] for source in shapes]
    target, tensors = ir.buffer_proxy(out), [ir.buffer_proxy(buffer) for buffer in ins]
    jobs = min(JOBS, rows) if math.prod(shape) >= WORTH_A_LAUNCH else 1
    share = -(-rows // jobs)
    one = tirx.const(1, "int32")
    keeps_pixels = spread == Spread((1, 1), (0, 0), (rows, shapes[0][3]))

    def vector(
        picked: Sequence[Pick], shifts: Sequence[int], turn: Index, image: Index, row: Index, column: Index
    ) -> tirx.Expr:
        """Return a vector with the picked channels of a pixel, in a round of a run."""
        moves = _moves(picked, blocks)
        widths = [blocks[source] for (source, _), _ in moves]
        zeros = len(picked) < block or widths[0] < block
        value = tirx.Broadcast(tirx.const(0, out.dtype), block) if zeros else None
        for ((source, place), lanes), shift, width in zip(moves, shifts, widths, strict=True):
            at = place + turn * shift
            loaded = tensors[source][image, at, row, column, tirx.Ramp(tirx.const(0, "int32"), one, width)]
            # The lanes of `loaded` come first, then those of `value`; what no source has set yet is not read.
            order = [0] * block if value is None else list(range(width, width + block))
            for lane, other in lanes:
                order[lane] = other
            whole = value is None and order == list(range(width))
            value = loaded if whole else tirx.Shuffle([loaded] if value is None else [loaded, value], order)
        assert value is not None
        return value

    with IRBuilder() as builder, ir.seq_scope(), ir.parallel(0, jobs) as job, ir.serial(0, batch) as image:
        for run in runs(picks, block, blocks):
            if keeps_pixels and _copies_blocks(run, picks[0], block, blocks):
                source, channel = picks[0][run.first * block]
                size = math.prod(shape[2:])
                count = run.rounds * run.period * size
                part = -(-count // jobs)
                begin = job * part
                source_begin = (image * shapes[source][1] + channel // block) * size + begin
                result_begin = (image * shape[1] + run.first) * size + begin
                with ir.serial(0, tirx.max(tirx.min(part, count - begin), 0)) as step:
                    target[result_begin + step] = tensors[source][source_begin + step]
                continue
            with ir.serial(0, run.rounds) as turn:
                for k, shifts in enumerate(run.shifts):
                    channel, number = (run.first + k) * block, run.first + k + turn * run.period
                    for (i, j), picked, shift in zip(spread.phases, picks, shifts, strict=True):
                        (top, bottom), (left, right) = spread.range(0, i), spread.range(1, j)
                        begin, end = (top, bottom) if jobs == 1 else _share(job * share, share, top, bottom)
                        with ir.serial(0, end - begin) as step, ir.serial(0, right - left) as place:
                            row, column = begin + step, left + place
                            value = vector(picked[channel : channel + block], shift, turn, image, row, column)
                            below, along = row * spread.strides[0] + i, column * spread.strides[1] + j
                            lanes = tirx.Ramp(tirx.const(0, "int32"), one, block)
                            target[image, number, below - spread.cut[0], along - spread.cut[1], lanes] = value
    return builder.get()


def _copies_blocks(run: Run, picked: Sequence[Pick], block: int, blocks: Sequence[int]) -> bool:
    """Whether a run copies blocks of one source that follow each other, which LLVM turns into `memcpy`."""
    source, channel = picked[run.first * block]
    count = run.rounds * run.period * block
    own = picked[run.first * block : run.first * block + count]
    return (
        blocks[source] == block
        and channel % block == 0
        and list(own) == [(source, channel + k) for k in range(count)]
    )


def _share(first: tirx.Expr, count: int, top: int, bottom: int) -> tuple[tirx.Expr, tirx.Expr]:
    """Return the rows from `first` on, `count` of them, that are among `top` to `bottom`."""
    begin = tirx.max(first, top)
    return begin, tirx.max(tirx.min(first + count, bottom), begin)
