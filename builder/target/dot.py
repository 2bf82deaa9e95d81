"""Which instruction of a core multiplies small integers and adds the products to sums of 32 bits."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Tile:
    """The tiles of a core that multiplies these (AMX).

    `rows`: the most rows of the left factor and of the sums.
    `bytes`: in a row of the left factor: what is added to a sum at once.
    `columns`: sums of 32 bits in a row.
    """

    rows: int
    bytes: int
    columns: int


# Palette 1: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18.
TILE: Final = Tile(rows=16, bytes=64, columns=16)


@dataclass(frozen=True, slots=True)
class Dot:
    """Sums of products: each lane of a vector of sums takes the products of one group.

    Attributes
    ----------
    name
        The instruction, as LLVM names it without `llvm.`; "" for arithmetic that any core has.
    lanes
        Sums in a vector.
    group
        Adjacent elements of both factors that a step adds to one sum.
    data
        The left factor's dtype: `uint8`, `int8`, or `int16` for values of either, when the right one's is
        int8.
    block
        Adjacent channels of a value, a multiple of `lanes` and of `group`.
    tile
        Vectors of sums that are kept in registers while the products are added.
    held
        Whether a block of the left factor is held in a vector register, whose elements are factors.
    halves
        Whether the weights of a group of four are stored as those of its first two elements for all lanes,
        then those of the last two: two products of bytes are added in 16 bits, and pairs of these in 32.
    word_group
        As `group`, if factors are 16-bit integers; 0 if bytes are multiplied so much faster that it does not
        pay to use these.
    tiles
        Whether the core also multiplies tiles of such factors: 16 rows of 64 bytes (`TILE`).
    """

    name: str
    lanes: int
    group: int
    data: str
    block: int
    tile: int
    held: bool = False
    halves: bool = False
    word_group: int = 0
    tiles: bool = False

    @classmethod
    def of(cls, arch: str, features: AbstractSet[str]) -> Dot:
        """The instruction of a core.

        Parameters
        ----------
        arch
            `x86_64`, `aarch64`, `armv7l` or `riscv64`.
        features
            The core's features, as LLVM names them.
        """
        if arch == "x86_64":
            dot = cls._of_x86(features)
            if not {"amx-int8", "amx-tile"} <= features:
                return dot
            return replace(dot, block=TILE.bytes if dot.data == "uint8" else dot.block, tiles=True)
        if arch == "aarch64":
            if "dotprod" in features:
                return cls("aarch64.neon.sdot.v4i32.v16i8", 4, 4, "int8", 16, 20, held=True)
            return cls("aarch64.neon.saddlp", 4, 4, "int8", 16, 16, held=True, halves=True, word_group=1)
        return cls("", 8, 1, "int16", 8, 4, held=arch == "armv7l", word_group=1)

    @classmethod
    def _of_x86(cls, features: AbstractSet[str]) -> Dot:
        if "avx512vnni" in features and "avx512f" in features:
            return cls("x86.avx512.vpdpbusd.512", 16, 4, "uint8", 16, 16)
        if "avxvnni" in features:
            return cls("x86.avx512.vpdpbusd.256", 8, 4, "uint8", 8, 12)
        if "avx512bw" in features:
            return cls("x86.avx512.pmaddw.d.512", 16, 2, "int16", 16, 16, word_group=2)
        if "avx2" in features:
            return cls("x86.avx2.pmadd.wd", 8, 2, "int16", 8, 12, word_group=2)
        return cls("x86.sse2.pmadd.wd", 4, 2, "int16", 8, 12, word_group=2)

    @property
    def at_once(self) -> float:
        """Products that an instruction does, on average, without the additions that follow PMADDWD."""
        if self.halves:
            return 16 / 3  # SMULL, SMLAL and SADALP
        return self.lanes * self.group if self.name else 4
