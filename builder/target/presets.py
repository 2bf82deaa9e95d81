"""Targets that have a name, without the compiler: they are looked up before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from builder.errors import TargetError
from builder.spelling import did_you_mean


@dataclass(frozen=True, slots=True)
class Preset:
    """A target with a name.

    `about`: the devices that it is for.
    """

    config: Mapping[str, Any]
    about: str


_AARCH64: Final = "aarch64-linux-gnu"
PRESETS: Final[Mapping[str, Preset]] = {
    "host": Preset({"kind": "llvm"}, "this machine: its own CPU and cores"),
    "rpi3": Preset(
        {"kind": "llvm", "mtriple": _AARCH64, "mcpu": "cortex-a53", "mattr": ["+neon"], "num-cores": 4},
        "Raspberry Pi 3, Zero 2 W (64 bit): Cortex-A53",
    ),
    "rpi4": Preset(
        {"kind": "llvm", "mtriple": _AARCH64, "mcpu": "cortex-a72", "mattr": ["+neon"], "num-cores": 4},
        "Raspberry Pi 4, 400 (64 bit): Cortex-A72",
    ),
    "rpi5": Preset(
        {"kind": "llvm", "mtriple": _AARCH64, "mcpu": "cortex-a76", "mattr": ["+neon"], "num-cores": 4},
        "Raspberry Pi 5, 500 (64 bit): Cortex-A76 with dot products",
    ),
    "rpi-armv7": Preset(
        {
            "kind": "llvm",
            "mtriple": "armv7l-linux-gnueabihf",
            "mcpu": "cortex-a7",
            "mattr": ["+neon", "+vfp4"],
            "mfloat-abi": "hard",
            "num-cores": 4,
        },
        "Raspberry Pi 2 and later with a 32-bit system (hard float, NEON)",
    ),
    "x86-64-v3": Preset(
        {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v3", "num-cores": 4},
        "any x86-64 of the last ten years (AVX2, FMA)",
    ),
    "riscv64": Preset(
        {
            "kind": "llvm",
            "mtriple": "riscv64-linux-gnu",
            "mcpu": "generic-rv64",
            "mattr": ["+m", "+a", "+f", "+d", "+c"],
            "mabi": "lp64d",
            "num-cores": 4,
        },
        "64-bit RISC-V without vectors (rv64gc)",
    ),
}


def unknown_target(text: str) -> TargetError:
    """Return the error for a target that is neither a preset nor LLVM options nor JSON."""
    use = f'use {", ".join(PRESETS)}, "llvm -mcpu=NAME" or a TVM target as JSON'
    return TargetError(f"unknown target {text[:80]!r}", hint=did_you_mean(text, PRESETS, otherwise=use))
