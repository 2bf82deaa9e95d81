"""What heuristics know about a core beyond its vector unit: how fast it multiplies and reads, and its caches.

The figures are rounded. They decide between algorithms and sizes of tiles, where a factor of two matters and
a tenth does not. They are those of the vendors' optimisation guides and of the boards that carry the cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from builder.target.simd import Simd


@dataclass(frozen=True, slots=True)
class Core:
    """A core as heuristics see it.

    `products_per_ns`: vector multiply-adds that it completes in a nanosecond at its usual clock.
    `l1_bytes`, `l2_bytes`: sizes of its data caches. If cores share an L2 cache, its part.
    `l2_cores`: how many cores share the L2 cache.
    `cache_bytes_per_ns`: bytes that it reads in a nanosecond from the caches beyond L2.
    `memory_bytes_per_ns`: bytes that it reads in a nanosecond from memory while the other cores read nothing.
    `prefetches`: whether it has enough cache misses in flight for prefetches of weights to pay.
    `in_order`: whether it executes instructions in their order: LLVM then loads operands long before they are
        used.
    """

    products_per_ns: float
    l1_bytes: int
    l2_bytes: int
    cache_bytes_per_ns: float
    memory_bytes_per_ns: float
    prefetches: bool
    l2_cores: int = 1
    in_order: bool = False

    @classmethod
    def of(cls, arch: str, cpu: str, simd: Simd) -> Core:
        """Return the core that LLVM calls `cpu`, or the usual one with this vector unit.

        `arch`: `x86_64`, `aarch64`, `armv7l` or `riscv64`.
        `cpu`: LLVM's name, such as `cortex-a72`.
        """
        if arch == "x86_64":
            usual = (32 * _K, 1024 * _K if simd.lanes == 16 else 512 * _K)
            l1_bytes, l2_bytes = _X86_CACHES.get(cpu, usual)
            return replace(_X86, l1_bytes=l1_bytes, l2_bytes=l2_bytes)
        return _OTHERS.get(cpu, _A72)


_K: Final = 1 << 10
# Two 3 GHz units for multiply-adds.
_X86: Final = Core(6.0, 32 * _K, 512 * _K, 8.0, 24.0, prefetches=True)
# LLVM's name -> L1 and L2.
_X86_CACHES: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("haswell", "broadwell", "skylake"), (32 * _K, 256 * _K)),
    **dict.fromkeys(("skylake-avx512", "cascadelake", "cooperlake"), (32 * _K, 1024 * _K)),
    **dict.fromkeys(("icelake-client", "tigerlake", "rocketlake"), (48 * _K, 512 * _K)),
    **dict.fromkeys(("icelake-server",), (48 * _K, 1280 * _K)),
    **dict.fromkeys(("sapphirerapids", "emeraldrapids", "graniterapids", "alderlake"), (48 * _K, 2048 * _K)),
    **dict.fromkeys(("znver1", "znver2", "znver3"), (32 * _K, 512 * _K)),
    "znver4": (32 * _K, 1024 * _K),
    "znver5": (48 * _K, 1024 * _K),
}
_A53: Final = Core(0.7, 32 * _K, 128 * _K, 4.0, 2.0, prefetches=False, l2_cores=4, in_order=True)
_A72: Final = Core(1.5, 32 * _K, 256 * _K, 8.0, 4.0, prefetches=False, l2_cores=4)
_A76: Final = Core(4.8, 64 * _K, 512 * _K, 16.0, 9.0, prefetches=False)
_OTHERS: Final[Mapping[str, Core]] = {
    "cortex-a7": Core(0.25, 32 * _K, 128 * _K, 2.0, 1.0, prefetches=False, l2_cores=4),
    "generic-rv64": Core(0.4, 32 * _K, 128 * _K, 4.0, 2.0, prefetches=False, l2_cores=4),
    **dict.fromkeys(("cortex-a35", "cortex-a53", "cortex-a55"), _A53),
    **dict.fromkeys(("cortex-a76", "cortex-a77", "cortex-a78", "neoverse-n1", "neoverse-v1"), _A76),
}
