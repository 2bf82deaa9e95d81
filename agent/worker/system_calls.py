"""The system calls that a worker may make once its model is about to be loaded, and their numbers.

Numbers are those of the kernel's own tables; arm64 and riscv64 share one (asm-generic). A test compares them
with the kernel headers of each architecture.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# name -> (x86-64, arm64 and riscv64, arm EABI); None where an architecture has no such call.
Numbers = tuple[int | None, int | None, int | None]

# Memory, threads, time, signals, and descriptors that are already open. All other calls are refused.
ALLOWED: Final[Mapping[str, Numbers]] = MappingProxyType(
    {
        "read": (0, 63, 3),
        "write": (1, 64, 4),
        "readv": (19, 65, 145),
        "writev": (20, 66, 146),
        "pread64": (17, 67, 180),
        "close": (3, 57, 6),
        "lseek": (8, 62, 19),
        "_llseek": (None, None, 140),
        "fstat": (5, 80, 108),
        "fstat64": (None, None, 197),
        # The dynamic linker's fstat, by an empty path; of other paths it only reveals whether they exist.
        "newfstatat": (262, 79, None),
        "fstatat64": (None, None, 327),
        "statx": (332, 291, 397),
        "fcntl": (72, 25, 55),
        "fcntl64": (None, None, 221),
        "munmap": (11, 215, 91),
        "madvise": (28, 233, 220),
        "mremap": (25, 216, 163),
        "brk": (12, 214, 45),
        "membarrier": (324, 283, 389),
        "futex": (202, 98, 240),
        "futex_time64": (None, None, 422),
        "set_robust_list": (273, 99, 338),
        "rseq": (334, 293, 398),
        "gettid": (186, 178, 224),
        "getpid": (39, 172, 20),
        "getuid": (102, 174, 24),
        "geteuid": (107, 175, 49),
        "getgid": (104, 176, 47),
        "getegid": (108, 177, 50),
        "getuid32": (None, None, 199),
        "geteuid32": (None, None, 201),
        "getgid32": (None, None, 200),
        "getegid32": (None, None, 202),
        "sched_yield": (24, 124, 158),
        # Kernels pin their threads.
        "sched_getaffinity": (204, 123, 242),
        "sched_setaffinity": (203, 122, 241),
        "getcpu": (309, 168, 345),
        "rt_sigaction": (13, 134, 174),
        "rt_sigprocmask": (14, 135, 175),
        "rt_sigreturn": (15, 139, 173),
        "sigreturn": (None, None, 119),
        "sigaltstack": (131, 132, 186),
        "restart_syscall": (219, 128, 0),
        "clock_gettime": (228, 113, 263),
        "clock_gettime64": (None, None, 403),
        "clock_getres": (229, 114, 264),
        "clock_getres_time64": (None, None, 406),
        "gettimeofday": (96, 169, 78),
        "time": (201, None, None),
        "clock_nanosleep": (230, 115, 265),
        "clock_nanosleep_time64": (None, None, 407),
        "nanosleep": (35, 101, 162),
        "poll": (7, None, 168),
        "ppoll": (271, 73, 336),
        "ppoll_time64": (None, None, 414),
        # The channel: there is no other socket, and none can be made.
        "recvfrom": (45, 207, 292),
        "recvmsg": (47, 212, 297),
        "sendto": (44, 206, 290),
        "sendmsg": (46, 211, 296),
        "recv": (None, None, 291),
        "send": (None, None, 289),
        "getrandom": (318, 278, 384),
        "getrusage": (98, 165, 77),
        # qsort of older glibc asks for the size of the memory.
        "sysinfo": (99, 179, 116),
        "uname": (63, 160, 122),
        "exit": (60, 93, 1),
        "exit_group": (231, 94, 248),
    }
)
# Allowed depending on an argument.
CLONE: Final[Numbers] = (56, 220, 120)
KILL: Final[Numbers] = (62, 129, 37)
TGKILL: Final[Numbers] = (234, 131, 268)
PRLIMIT64: Final[Numbers] = (302, 261, 369)
PRCTL: Final[Numbers] = (157, 167, 172)
MMAP: Final[Numbers] = (9, 222, 192)
MPROTECT: Final[Numbers] = (10, 226, 125)
# Refused with ENOSYS: the C library then makes a thread with clone, whose flags a filter can check.
CLONE3: Final[Numbers] = (435, 435, 435)
# For the dynamic linker, until the model is loaded.
OPEN: Final[Numbers] = (2, None, 5)
OPENAT: Final[Numbers] = (257, 56, 322)
# For the sandbox itself, until it is closed completely.
SECCOMP: Final[Numbers] = (317, 277, 383)
LANDLOCK_CREATE_RULESET: Final = 444
LANDLOCK_RESTRICT_SELF: Final = 446


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
