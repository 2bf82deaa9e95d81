"""Estimates how long a program takes on a board, from what it executes and what its caches miss.

The time of a stretch has two parts, each for one core and for several that share the work evenly:

- working: the cycles of its blocks, and the misses that nothing announced, each with its latency divided by
  the number that a core waits for at once
- moving: the lines of streams from the caches behind the L1 cache, and the bytes to and from memory over its
  bandwidth, which all cores share

A core can work while lines arrive that a prefetcher asked for; `Board.overlap` is the share of the shorter
part that takes no time. Not modelled: mispredicted branches, address translation, misses of instructions,
software prefetches, the start and the end of a parallel loop, and work that does not divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.estimates.block_cycles import cycles_of, frequent
from benchmarks.estimates.board import Board
from benchmarks.instructions.traffic import LINE_BYTES, Stretch, Traffic


@dataclass(frozen=True, slots=True)
class Estimate:
    """An estimated time.

    Attributes
    ----------
    ns
        The time in nanoseconds.
    compute_ns
        The share of the cores' instructions, with all data in the L1 cache.
    waiting_ns
        The share of misses that nothing announced.
    streaming_ns
        The share of lines of streams from caches.
    memory_ns
        The share of bytes to and from memory. The parts can exceed the time: it hides some of them.
    memory_bytes
        Bytes to and from memory.
    """

    ns: float
    compute_ns: float
    waiting_ns: float
    streaming_ns: float
    memory_ns: float
    memory_bytes: int

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.ns + other.ns,
            self.compute_ns + other.compute_ns,
            self.waiting_ns + other.waiting_ns,
            self.streaming_ns + other.streaming_ns,
            self.memory_ns + other.memory_ns,
            self.memory_bytes + other.memory_bytes,
        )

    def between(self, other: Estimate) -> Estimate:
        """Return the mean of two estimates."""
        both = self + other
        return Estimate(
            both.ns / 2,
            both.compute_ns / 2,
            both.waiting_ns / 2,
            both.streaming_ns / 2,
            both.memory_ns / 2,
            both.memory_bytes // 2,
        )


NOTHING = Estimate(0.0, 0.0, 0.0, 0.0, 0.0, 0)


def cycles(traffic: Traffic, board: Board) -> dict[int, float]:
    """Return the cycles of an execution of each block that runs often on the board's core."""
    often = frequent(traffic.stretches, traffic.blocks)
    codes = [traffic.blocks[number].code for number in often]
    return dict(zip(often, cycles_of(codes, board.arch, board.model), strict=True))


def by_label(
    traffic: Traffic, board: Board, threads: int, variant: int, known: Mapping[int, float]
) -> dict[int, Estimate]:
    """Return the estimates by mark.

    Parameters
    ----------
    traffic
        What the program did.
    board
        The machine; `traffic` was recorded with its caches.
    threads
        Cores that share the work.
    variant
        The number of the variant of `traffic` that has the caches of so many threads.
    known
        What `cycles` returned.
    """
    found: dict[int, Estimate] = {}
    for stretch in traffic.stretches:
        each = _of_stretch(stretch, traffic, board, threads, variant, known)
        found[stretch.label] = found.get(stretch.label, NOTHING) + each
    return found


def _of_stretch(
    stretch: Stretch, traffic: Traffic, board: Board, threads: int, variant: int, known: Mapping[int, float]
) -> Estimate:
    spent = 0.0
    analysed = 0
    for number, times in stretch.blocks.items():
        if number in known:
            spent += known[number] * times
            analysed += traffic.blocks[number].instructions * times
    # Rare blocks take as long as the others.
    spent *= stretch.instructions / analysed if analysed else 0.0
    compute = spent / board.clock_ghz / threads
    beyond = stretch.beyond[variant]
    waits = 0.0
    missed, streamed = stretch.waiting, stretch.streamed
    streams = 0.0
    for level, waiting, in_stream in zip(board.levels, beyond.waiting, beyond.streamed, strict=True):
        waits += (missed - waiting) * level.latency_ns
        streams += streamed * LINE_BYTES / level.bytes_per_ns
        missed, streamed = waiting, in_stream
    waits += missed * board.memory_ns
    waits /= board.misses_at_once * threads
    streams /= threads
    size = beyond.read_bytes + beyond.written_bytes
    memory = size / board.memory_bytes_per_ns
    working, moving = compute + waits, streams + memory
    total = max(working, moving) + (1 - board.overlap) * min(working, moving)
    return Estimate(total, compute, waits, streams, memory, size)
