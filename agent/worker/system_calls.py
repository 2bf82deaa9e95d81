"""The system calls that a worker may make once its model is about to be loaded, and their numbers.

Numbers are those of the kernel's own tables; arm64 and riscv64 share one (asm-generic). A test compares them
with the kernel headers of each architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from agent.confinement.architecture import SECCOMP, Numbers

# Memory, threads, time, signals, and descriptors that are already open. All other calls are refused.
ALLOWED: Final[Mapping[str, Numbers]] = MappingProxyType(
    {
        "write": (1, 64, 4),
        "writev": (20, 66, 146),
        "pread64": (17, 67, 180),
        "close": (3, 57, 6),
        "fstat": (5, 80, 108),
        "fstat64": (None, None, 197),
        # The dynamic linker's fstat, by an empty path; of other paths it only reveals whether they exist.
        "newfstatat": (262, 79, None),
        "fstatat64": (None, None, 327),
        "statx": (332, 291, 397),
        "munmap": (11, 215, 91),
        "mremap": (25, 216, 163),
        "brk": (12, 214, 45),
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
        # glibc asks for a thread's by its number. Only the agent moves a worker to other processors.
        "sched_getaffinity": (204, 123, 242),
        "getcpu": (309, 168, 345),
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
        "getrandom": (318, 278, 384),
        "getrusage": (98, 165, 77),
        # qsort of older glibc asks for the size of the memory.
        "sysinfo": (99, 179, 116),
        "uname": (63, 160, 122),
        "exit": (60, 93, 1),
        "exit_group": (231, 94, 248),
    }
)
# Flags of glibc's threads, and one that musl adds; others make a process, or a thread that shares less.
_THREAD: Final = 0x3D0F00
_CLONE_DETACHED: Final = 0x400000
_PROT_EXEC: Final = 4
_MAP_LOCKED: Final = 0x2000
_MAP_HUGETLB: Final = 0x40000
_MSG_OOB: Final = 1
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND; O_TMPFILE needs one of the first two.
_O_WRITE: Final = 0o3103
_SIGXCPU: Final = 24
_FIRST_OWN_DESCRIPTOR: Final = 3
# F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC, F_GET_SEALS. Not F_SETFL (O_ASYNC, and O_NONBLOCK of what the
# agent shares), F_SETOWN and F_SETSIG (signals to any process), locks, leases, F_NOTIFY, F_SETPIPE_SZ.
_FCNTL: Final = (1, 2, 3, 1030, 1034)
# NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, DONTFORK, HUGEPAGE, NOHUGEPAGE, POPULATE_READ,
# POPULATE_WRITE, GUARD_INSTALL, GUARD_REMOVE. Not MERGEABLE, which shares pages with other processes and
# makes the kernel search for them, nor PAGEOUT.
_MADVISE: Final = (0, 1, 2, 3, 4, 8, 10, 14, 15, 22, 23, 102, 103)
# QUERY and the private commands. GLOBAL and GLOBAL_EXPEDITED interrupt the processors of other processes.
_MEMBARRIER: Final = (0, 8, 16, 32, 64, 128, 256)
# PR_SET_NAME, and PR_SET_VMA, with which glibc names thread stacks and heaps.
_PRCTL: Final = (15, 0x53564D41)
# linux/arch/x86/include/uapi/asm/prctl.h, and the component of XSAVE that holds AMX's tiles.
_REQ_XCOMP_PERM: Final = 0x1023
_XTILEDATA: Final = 18


@dataclass(frozen=True, slots=True)
class OneOf:
    """The argument of that index, as a C int, is one of these values."""

    argument: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoneOf:
    """The argument is none of these values."""

    argument: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The argument, without a sign, is at least this value."""

    argument: int
    value: int


@dataclass(frozen=True, slots=True)
class Without:
    """The argument has none of these bits."""

    argument: int
    bits: int


@dataclass(frozen=True, slots=True)
class Null:
    """The argument is a null pointer."""

    argument: int


@dataclass(frozen=True, slots=True)
class OwnProcess:
    """The argument is the number of this process."""

    argument: int


Rule = OneOf | NoneOf | AtLeast | Without | Null | OwnProcess


@dataclass(frozen=True, slots=True)
class Checked:
    """A call, by its numbers, that is allowed if its arguments pass all rules.

    A filter sees the arguments' registers and not what pointers refer to.
    """

    numbers: Numbers
    rules: tuple[Rule, ...]


CHECKED: Final[Mapping[str, Checked]] = MappingProxyType(
    {
        # Standard output and error are the agent's, whose position and input they share.
        "read": Checked((0, 63, 3), (NoneOf(0, (1, 2)),)),
        "readv": Checked((19, 65, 145), (NoneOf(0, (1, 2)),)),
        "lseek": Checked((8, 62, 19), (AtLeast(0, _FIRST_OWN_DESCRIPTOR),)),
        "_llseek": Checked((None, None, 140), (AtLeast(0, _FIRST_OWN_DESCRIPTOR),)),
        "fcntl": Checked((72, 25, 55), (AtLeast(0, _FIRST_OWN_DESCRIPTOR), OneOf(1, _FCNTL))),
        "fcntl64": Checked((None, None, 221), (AtLeast(0, _FIRST_OWN_DESCRIPTOR), OneOf(1, _FCNTL))),
        "madvise": Checked((28, 233, 220), (OneOf(2, _MADVISE),)),
        "membarrier": Checked((324, 283, 389), (OneOf(0, _MEMBARRIER),)),
        # The channel: there is no other socket, none can be made, and descriptors cannot be received.
        "recvfrom": Checked((45, 207, 292), (Without(3, _MSG_OOB),)),
        "recv": Checked((None, None, 291), (Without(3, _MSG_OOB),)),
        "sendmsg": Checked((46, 211, 296), (Without(2, _MSG_OOB),)),
        "kill": Checked((62, 129, 37), (OwnProcess(0),)),
        "tgkill": Checked((234, 131, 268), (OwnProcess(0),)),
        # A process that ignores SIGXCPU outlives its processor time.
        "rt_sigaction": Checked((13, 134, 174), (NoneOf(0, (_SIGXCPU,)),)),
        # Limits may be read.
        "prlimit64": Checked((302, 261, 369), (OneOf(0, (0,)), Null(2))),
        "prctl": Checked((157, 167, 172), (OneOf(0, _PRCTL),)),
    }
)
# A thread, and no process.
CLONE: Final = Checked((56, 220, 120), (OneOf(0, (_THREAD, _THREAD | _CLONE_DETACHED)),))
# mmap2 on arm; locked and huge pages are taken from what all processes share.
_MMAP: Final[Numbers] = (9, 222, 192)
_MPROTECT: Final[Numbers] = (10, 226, 125)
# Until the model is loaded, the dynamic linker opens files and maps code.
LOADING: Final[Mapping[str, Checked]] = MappingProxyType(
    {
        "mmap": Checked(_MMAP, (Without(3, _MAP_LOCKED | _MAP_HUGETLB),)),
        "mprotect": Checked(_MPROTECT, ()),
        # Only for reading: without Landlock, /proc/PID/mem of the agent would be writable.
        "open": Checked((2, None, 5), (Without(1, _O_WRITE),)),
        "openat": Checked((257, 56, 322), (Without(2, _O_WRITE),)),
        # A library whose kernels use AMX asks for the state of its tiles; no other command of this call.
        "arch_prctl": Checked((158, None, None), (OneOf(0, (_REQ_XCOMP_PERM,)), OneOf(1, (_XTILEDATA,)))),
        # For the second filter.
        "seccomp": Checked(SECCOMP, ()),
    }
)
SERVING: Final[Mapping[str, Checked]] = MappingProxyType(
    {
        "mmap": Checked(_MMAP, (Without(2, _PROT_EXEC), Without(3, _MAP_LOCKED | _MAP_HUGETLB))),
        "mprotect": Checked(_MPROTECT, (Without(2, _PROT_EXEC),)),
    }
)
# Refused with ENOSYS: the C library then makes a thread with clone, whose flags a filter can check.
CLONE3: Final[Numbers] = (435, 435, 435)
