"""What an estimate knows about a machine: its cores' clock and LLVM model, its caches, and its memory.

Sizes of caches are those of `builder/target/core.py` where both have them. Sources of the others:

- caches: the technical reference manuals of Cortex-A53, A72 and A76, and the boards' data sheets
- latencies and bandwidths: tinymembench in the results of sbc-bench, https://github.com/ThomasKaiser/sbc-bench,
  `results/1iI5.txt` (Raspberry Pi 3 B+), `3InF.txt` (4 B at 1.8 GHz) and `4JAv.txt` (5). A latency is that of
  random reads in excess of the L1 cache's. Bandwidth is twice that of the copy, but for the Pi 3 that of the
  read, which is lower. Two reads at once tell how many misses a core can wait for.
- no source, chosen by published times (`ncnn_boards.py`): the overlap, and the bandwidth of caches, 16 bytes
  a cycle on the A53 and the A72, less on the A76
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from benchmarks.instructions.traffic import Cache
from benchmarks.layers import Roof
from builder.target.device_target import resolve


@dataclass(frozen=True, slots=True)
class Level:
    """A cache behind the L1 cache.

    Attributes
    ----------
    cache
        Its size and associativity.
    latency_ns
        What an access costs in addition to one of the L1 cache.
    bytes_per_ns
        Bytes of a stream that a core reads from it in a nanosecond.
    shared
        Whether the cores share it.
    """

    cache: Cache
    latency_ns: float
    bytes_per_ns: float
    shared: bool


@dataclass(frozen=True, slots=True)
class Board:
    """A machine.

    Attributes
    ----------
    name
        Its name in tables.
    cpu
        qemu's name of its cores.
    arch, model
        LLVM's names of its architecture and of the model of its cores.
    clock_ghz
        The clock of its cores.
    cores
        Their number.
    first
        The L1 data cache.
    levels
        The caches behind it, nearest first.
    memory_ns
        The latency of memory, as in `Level`.
    memory_bytes_per_ns
        Bytes that all cores together read and write in a nanosecond.
    misses_at_once
        Misses that a core waits for at the same time.
    overlap
        The share of the shorter of computing and transferring that takes no time, from 0 to 1.
    read_allocate
        Whether cores stop to read the lines of a stream of writes.
    """

    name: str
    cpu: str
    arch: str
    model: str
    clock_ghz: float
    cores: int
    first: Cache
    levels: tuple[Level, ...]
    memory_ns: float
    memory_bytes_per_ns: float
    misses_at_once: float
    overlap: float
    read_allocate: bool

    def caches(self, threads: int) -> tuple[Cache, ...]:
        """Return what one of `threads` busy cores has of each cache behind the L1 cache."""
        return tuple(
            Cache(level.cache.size_bytes // threads, level.cache.ways) if level.shared else level.cache
            for level in self.levels
        )


_K: Final = 1 << 10


def boards() -> dict[str, Board]:
    """Return the boards by their preset: `rpi3`, `rpi4`, `rpi5`."""
    l1 = {name: resolve(name).core.l1_bytes for name in ("rpi3", "rpi4", "rpi5")}
    l2 = {name: resolve(name).core.l2_bytes for name in l1}
    return {
        "rpi3": Board(
            "Raspberry Pi 3 B+", "cortex-a53", "aarch64", "cortex-a53", 1.4, 4, Cache(l1["rpi3"], 4),
            (Level(Cache(4 * l2["rpi3"], 16), 11.0, 22.4, shared=True),),
            memory_ns=160.0, memory_bytes_per_ns=2.3, misses_at_once=1.6, overlap=1.0, read_allocate=True,
        ),
        "rpi4": Board(
            "Raspberry Pi 4 B", "cortex-a72", "aarch64", "cortex-a72", 1.8, 4, Cache(l1["rpi4"], 2),
            (Level(Cache(4 * l2["rpi4"], 16), 9.0, 28.8, shared=True),),
            memory_ns=130.0, memory_bytes_per_ns=5.1, misses_at_once=1.7, overlap=0.0, read_allocate=True,
        ),
        "rpi5": Board(
            "Raspberry Pi 5", "cortex-a76", "aarch64", "neoverse-n1", 2.4, 4, Cache(l1["rpi5"], 4),
            (
                Level(Cache(l2["rpi5"], 8), 3.5, 32.0, shared=False),
                Level(Cache(2048 * _K, 16), 20.0, 16.0, shared=True),
            ),
            memory_ns=130.0, memory_bytes_per_ns=8.9, misses_at_once=1.7, overlap=1.0, read_allocate=True,
        ),
    }  # fmt: skip


def this_machine(roof: Roof) -> Board:
    """Return one core of this x86-64 machine.

    Latencies, the clock and the L3 cache are those of usual servers: a virtual machine does not tell.

    Parameters
    ----------
    roof
        The measured bandwidths of one core. A triad writes lines that the core reads first: the roof does not
        count these reads, and an estimate does.
    """
    host = resolve("host")
    speed = roof.gbytes_per_s
    return Board(
        "this machine", "max", "x86_64", host.cpu, 3.6, 1, Cache(host.core.l1_bytes, 8),
        (
            Level(Cache(host.core.l2_bytes, 8), 3.0, speed["L2"], shared=False),
            Level(Cache(32 << 20, 16), 12.0, speed["L3"], shared=False),
        ),
        memory_ns=110.0, memory_bytes_per_ns=speed["memory"] * 4 / 3, misses_at_once=6.0, overlap=1.0,
        read_allocate=False,
    )  # fmt: skip
