"""Architectures, and the numbers of system calls on each.

Numbers are those of the kernel's own tables; arm64 and riscv64 share one (asm-generic).
"""

from __future__ import annotations

import platform
import struct
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# name -> (x86-64, arm64 and riscv64, arm EABI); None where an architecture has no such call.
Numbers = tuple[int | None, int | None, int | None]
SECCOMP: Final[Numbers] = (317, 277, 383)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A column of the table, and its AUDIT_ARCH for filters (linux/audit.h)."""

    name: str
    column: int
    audit: int

    def number(self, numbers: Numbers) -> int | None:
        """Return a call's number, or None where this architecture has no such call."""
        return numbers[self.column]


_X86_64: Final = Architecture("x86_64", 0, 0xC000003E)
_ARCHITECTURES: Final = MappingProxyType(
    {
        ("x86_64", 8): _X86_64,
        ("aarch64", 8): Architecture("aarch64", 1, 0xC00000B7),
        ("riscv64", 8): Architecture("riscv64", 1, 0xC00000F3),
        ("armv7l", 4): Architecture("arm", 2, 0x40000028),
        # A 32-bit system on a 64-bit kernel, as in Raspberry Pi OS.
        ("aarch64", 4): Architecture("arm", 2, 0x40000028),
        ("armv8l", 4): Architecture("arm", 2, 0x40000028),
    }
)


def detect_architecture() -> Architecture | None:
    """Return this process's architecture, or None if there is no table for it."""
    return _ARCHITECTURES.get((platform.machine(), struct.calcsize("P")))
