"""Filters of system calls as classic BPF: their instructions, and how they are put in force.

References: linux/seccomp.h, linux/filter.h.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from agent.confinement.architecture import SECCOMP, Architecture
from agent.confinement.raw_call import call

_SET_MODE_FILTER: Final = 1
RET_ALLOW: Final = 0x7FFF0000
RET_KILL_PROCESS: Final = 0x80000000
RET_ERRNO: Final = 0x00050000
RET_USER_NOTIF: Final = 0x7FC00000

# Instructions, and offsets in struct seccomp_data: nr, arch, instruction pointer, six arguments of 64 bits.
LOAD: Final = 0x20
JUMP_EQUAL: Final = 0x15
JUMP_ANY_BIT: Final = 0x45
JUMP_AT_LEAST: Final = 0x35
RETURN: Final = 0x06
NR: Final = 0
ARCH: Final = 4
ARGUMENT: Final = 16
X32_BIT: Final = 0x40000000


def instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    """Return an instruction: what it does with `k`, and how many to skip after a comparison."""
    return struct.pack("=HBBI", code, jump_true, jump_false, k)


def install(program: bytes, architecture: Architecture, flags: int = 0) -> int:
    """Put a filter in force, which needs no privileges if the process can gain none.

    Raises
    ------
    OSError
        If the kernel refuses.
    """
    number = architecture.number(SECCOMP)
    assert number is not None
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: count, padding, pointer.
    description = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    return call(number, _SET_MODE_FILTER, flags, description)
