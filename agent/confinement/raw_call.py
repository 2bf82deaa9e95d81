"""System calls for which the C library has no function."""

from __future__ import annotations

import ctypes
import os


def call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call and return its result, or raise OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Each is a C long, so that the upper half of every register is defined.
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
