"""What a program executes and what its caches miss, by the model of caches in `caches.c`, under qemu."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.instructions.emulator import plugged

LINE_BYTES: Final = 64
SLICE: Final = 1_000_000  # instructions of a stretch at most: short enough to keep kernels apart


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache with lines of 64 bytes.

    Attributes
    ----------
    size_bytes, ways
        Its size and associativity.
    """

    size_bytes: int
    ways: int


@dataclass(frozen=True, slots=True)
class Beyond:
    """What happened behind the L1 cache in a stretch, with one variant of the caches there.

    Attributes
    ----------
    waiting
        For each cache, misses that nothing announced.
    streamed
        For each cache, misses that continue a stream of lines, which a prefetcher announces.
    read_bytes, written_bytes
        Bytes from and to memory.
    """

    waiting: tuple[int, ...]
    streamed: tuple[int, ...]
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a program between two marks, of at most about `SLICE` instructions.

    Attributes
    ----------
    label
        The label of the mark before it.
    instructions, accesses
        Executed instructions, and accesses to memory as the emulator makes them: eight bytes at most.
    waiting, streamed, evicted
        Misses of the L1 cache, as in `Beyond`, and the modified lines that it evicted.
    beyond
        For each variant of what is behind the L1 cache.
    blocks
        Translated block -> executions.
    """

    label: int
    instructions: int
    accesses: int
    waiting: int
    streamed: int
    evicted: int
    beyond: tuple[Beyond, ...]
    blocks: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of code without jumps into it.

    Attributes
    ----------
    instructions
        Their number.
    code
        The machine code.
    """

    instructions: int
    code: bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a program did between its first and its last mark, in order.

    Attributes
    ----------
    stretches
        In the order in which they ran.
    blocks
        Number -> block, for all blocks that ran.
    """

    stretches: tuple[Stretch, ...]
    blocks: Mapping[int, Block]


def watch(
    command: tuple[Sequence[str], Sequence[str], str],
    first: Cache,
    variants: Sequence[Sequence[Cache]],
    *,
    read_allocate: bool,
    slice_instructions: int = SLICE,
) -> Traffic:
    """Run a program with the model of caches.

    Parameters
    ----------
    command
        The emulator's command line, the program's, and its `PYTHONPATH`.
    first
        The L1 cache.
    variants
        The caches behind it, nearest first; all variants are modelled in the same run.
    read_allocate
        Whether the core stops to read the lines of a stream of writes.
    slice_instructions
        The length of a stretch.

    Raises
    ------
    RuntimeError
        If the program fails.
    """
    levels = ";".join([_text(first), *(",".join(_text(cache) for cache in variant) for variant in variants)])
    variables = {"CACHES_LEVELS": levels, "CACHES_SLICE": str(slice_instructions)}
    if read_allocate:
        variables["CACHES_READ_ALLOCATE"] = "1"
    emulator, arguments, python_path = command
    return read(plugged("caches.c", "CACHES_OUT", emulator, arguments, python_path, variables))


def read(text: str) -> Traffic:
    """Return what the plugin wrote.

    Raises
    ------
    ValueError
        If the program made less than two marks.
    """
    stretches: list[Stretch] = []
    blocks = {}
    measured = 0  # what follows the last mark is not measured
    for line in text.splitlines():
        if line.startswith("mark "):
            measured = len(stretches)
            continue
        if line.startswith("block "):
            _, number, size, code = line.split()
            blocks[int(number)] = Block(int(size), bytes.fromhex(code))
            continue
        counts, *variants, executed = line.split(" |")
        runs = dict(pair.split(":") for pair in executed.split())
        label, instructions, accesses, waiting, streamed, evicted = map(int, counts.split())
        beyond = tuple(_beyond([int(word) for word in variant.split()]) for variant in variants)
        times = {int(number): int(count) for number, count in runs.items()}
        stretches.append(Stretch(label, instructions, accesses, waiting, streamed, evicted, beyond, times))
    if not measured:
        raise ValueError("expected instructions between marks, got none")
    return Traffic(tuple(stretches[:measured]), blocks)


def _beyond(counts: list[int]) -> Beyond:
    *misses, read_bytes, written_bytes = counts
    return Beyond(tuple(misses[0::2]), tuple(misses[1::2]), read_bytes, written_bytes)


def _text(cache: Cache) -> str:
    return f"{cache.size_bytes}:{cache.ways}"
