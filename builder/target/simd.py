"""The properties of a core's vector unit that matter to float32 code."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Simd:
    """A vector unit.

    `lanes`: float32 values in the widest register that is worth using.
    `registers`: number of architectural vector registers of that width.
    """

    lanes: int
    registers: int
    fma: bool

    @classmethod
    def of(cls, arch: str, features: AbstractSet[str]) -> Simd:
        """The vector unit of a core.

        `arch`: `x86_64`, `aarch64`, `armv7l` or `riscv64`.
        """
        if arch == "x86_64":
            if "avx512f" in features:
                return cls(16, 32, fma=True)
            if "avx" in features:
                return cls(8, 16, fma="fma" in features)
            return cls(4, 16, fma=False)
        if arch == "aarch64":
            return cls(4, 32, fma=True)
        if arch == "armv7l":
            return cls(4, 16, fma="vfp4" in features)
        # No vector unit: LLVM keeps a "vector" of 4 values in 4 of the 32 floating-point registers.
        return cls(4, 8, fma=True)
