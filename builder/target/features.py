"""CPU features: LLVM's names and Linux's, and the CPU that LLVM takes for any of an architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# LLVM's name of a feature -> the name in /proc/cpuinfo, for features that kernels may use. Features that LLVM
# lists for a core but that some boards lack are left out: the Raspberry Pi 4, for example, has no AES.
CPUINFO_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "x86_64": {
        "ssse3": "ssse3", "sse4.1": "sse4_1", "sse4.2": "sse4_2", "popcnt": "popcnt", "avx": "avx",
        "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi": "bmi1", "bmi2": "bmi2", "lzcnt": "abm",
        "movbe": "movbe", "avx512f": "avx512f", "avx512cd": "avx512cd", "avx512bw": "avx512bw",
        "avx512dq": "avx512dq", "avx512vl": "avx512vl", "avx512vnni": "avx512_vnni",
        "avx512bf16": "avx512_bf16", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi",
        "avx512vbmi2": "avx512_vbmi2", "avx512bitalg": "avx512_bitalg",
        "avx512vpopcntdq": "avx512_vpopcntdq", "avx512fp16": "avx512_fp16", "avxvnni": "avx_vnni",
        "gfni": "gfni", "amx-tile": "amx_tile", "amx-int8": "amx_int8", "amx-bf16": "amx_bf16",
    },
    "aarch64": {
        "neon": "asimd", "fp-armv8": "fp", "dotprod": "asimddp", "fullfp16": "asimdhp", "lse": "atomics",
        "rdm": "asimdrdm", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve", "sve2": "sve2",
    },
    "armv7l": {"neon": "neon", "vfp4": "vfpv4", "vfp3": "vfpv3"},
    "riscv64": {},
}  # fmt: skip

# Architecture -> LLVM's name of its oldest CPU.
GENERIC_CPU: Final[Mapping[str, str]] = {
    "x86_64": "x86-64",
    "aarch64": "generic",
    "armv7l": "cortex-a7",
    "riscv64": "generic-rv64",
}
