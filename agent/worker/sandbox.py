"""The sandbox that a worker puts itself into before it runs a model's native code.

Promises, on a kernel that has them: resource limits that cannot be raised again; no new privileges; Landlock
without any rule, so that no path can be opened (memory files have no path); a filter for every thread that
allows the system calls listed in `system_calls` and refuses all others with EPERM. All imports must be done
before it is closed. If the kernel lacks Landlock or seccomp, the rest is applied all the same, and the status
says so.

The sandbox is closed in two steps: `close_files` before the model's library is mapped, because its
constructors are native code; then `close_loading`, which also forbids what the dynamic linker needs: opening
files, and new executable memory.

References: linux/landlock.h, linux/seccomp.h, linux/filter.h; Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.worker import system_calls as calls
from agent.worker.system_calls import Architecture, Numbers

_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_SET_NAME: Final = 15
# glibc names thread stacks and heaps with it.
_PR_SET_VMA: Final = 0x53564D41

_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
# Rights that Landlock handles, and so refuses, each with the version of the ABI that introduced them.
_LANDLOCK_FS: Final = ((1, 0x1FFF), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_LANDLOCK_NET: Final = ((4, 0b11),)
_LANDLOCK_SCOPED: Final = ((6, 0b11),)

_SECCOMP_SET_MODE_FILTER: Final = 1
_SECCOMP_FILTER_FLAG_TSYNC: Final = 1
_RET_ALLOW: Final = 0x7FFF0000
_RET_KILL_PROCESS: Final = 0x80000000
_RET_ERRNO: Final = 0x00050000

# Classic BPF, and offsets in struct seccomp_data: nr, arch, instruction pointer, six arguments of 64 bits.
_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_ANY_BIT: Final = 0x45
_JUMP_AT_LEAST: Final = 0x35
_RETURN: Final = 0x06
_NR: Final = 0
_ARCH: Final = 4
_ARGUMENT: Final = 16
_X32_BIT: Final = 0x40000000

_CLONE_THREAD: Final = 0x10000
_PROT_EXEC: Final = 4

# The channel, the standard streams, the bundle's members, and files that imports may have left open.
_MAX_DESCRIPTORS: Final = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the process; 0 for none.

    Attributes
    ----------
    memory_bytes
        Address space on top of what the process has now.
    """

    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Status:
    """Which parts of the sandbox are in force.

    Attributes
    ----------
    landlock
        Version of Landlock's ABI; 0 if it is not in force.
    seccomp
        Whether the filter of system calls is in force.
    reasons
        Why a part is not in force.
    """

    landlock: int
    seccomp: bool
    reasons: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether both are in force."""
        return self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        landlock = f"landlock {self.landlock}" if self.landlock else "no landlock"
        seccomp = "seccomp" if self.seccomp else "no seccomp"
        return ", ".join((landlock, seccomp, *self.reasons))


def close_files(limits: Limits) -> Status:
    """Limit the process, and forbid files, network and other processes. This cannot be undone.

    Returns
    -------
    Status
        The parts that the kernel put in force.

    Raises
    ------
    OSError
        If a resource limit or no-new-privileges is refused, which no supported kernel does.
    """
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    if limits.memory_bytes:
        _limit(resource.RLIMIT_AS, _address_space_bytes() + limits.memory_bytes)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    reasons: list[str] = []
    threads = len(list(Path("/proc/self/task").iterdir()))
    landlock = _attempt(lambda: _restrict_files(libc), "landlock", reasons)
    if threads > 1:
        # Landlock applies to the calling thread and those it starts, but an import has started others.
        reasons.append(f"{threads - 1} threads without landlock")
        landlock = 0
    seccomp = bool(_attempt(lambda: _filter(libc, loading=True), "seccomp", reasons))
    return Status(landlock, seccomp, tuple(reasons))


def close_loading(status: Status) -> None:
    """Forbid what only loading needed: opening files, and new executable memory.

    Raises
    ------
    OSError
        If the kernel refuses, although it accepted the first filter.
    """
    if status.seccomp:
        _filter(ctypes.CDLL(None, use_errno=True), loading=False)


def limit_cpu(budget_s: int) -> int:
    """Let the kernel end this process (SIGXCPU) after `budget_s` more processor seconds.

    Returns
    -------
    int
        The limit, as a reading of `time.process_time`.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # The limit counts whole seconds; the current one does not count for this request.
    most_s = int(usage.ru_utime + usage.ru_stime) + 1 + budget_s
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))
    return most_s


def filter_program(architecture: Architecture, pid: int, *, loading: bool) -> bytes:
    """Return the filter as classic BPF.

    Parameters
    ----------
    pid
        This process, the only one that may be sent signals.
    loading
        Whether a library must still be mapped.
    """
    program = [
        _instruction(_LOAD, _ARCH),
        _instruction(_JUMP_EQUAL, architecture.audit, 1, 0),
        _instruction(_RETURN, _RET_KILL_PROCESS),
        _instruction(_LOAD, _NR),
        # x32 calls have x86-64's architecture but other numbers.
        _instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1),
        _instruction(_RETURN, _RET_ERRNO | errno.EPERM),
    ]

    def when(numbers: Numbers, *then: bytes) -> None:
        number = architecture.number(numbers)
        if number is not None:
            program.extend((_instruction(_JUMP_EQUAL, number, 0, len(then)), *then))

    allow = _instruction(_RETURN, _RET_ALLOW)
    refuse = _instruction(_RETURN, _RET_ERRNO | errno.EPERM)

    def if_equal(argument: int, *values: int) -> tuple[bytes, ...]:
        tests = [_instruction(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)]
        return _load(argument), *tests, refuse, allow

    def unless_bit(argument: int, bits: int) -> tuple[bytes, ...]:
        return _load(argument), _instruction(_JUMP_ANY_BIT, bits, 0, 1), refuse, allow

    for numbers in calls.ALLOWED.values():
        when(numbers, allow)
    when(calls.CLONE, _load(0), _instruction(_JUMP_ANY_BIT, _CLONE_THREAD, 0, 1), allow, refuse)
    when(calls.CLONE3, _instruction(_RETURN, _RET_ERRNO | errno.ENOSYS))
    when(calls.KILL, *if_equal(0, pid))
    when(calls.TGKILL, *if_equal(0, pid))
    when(calls.PRLIMIT64, *if_equal(0, 0))
    when(calls.PRCTL, *if_equal(0, _PR_SET_NAME, _PR_SET_VMA))
    if loading:
        for numbers in (calls.MMAP, calls.MPROTECT, calls.OPEN, calls.OPENAT, calls.SECCOMP):
            when(numbers, allow)
    else:
        when(calls.MMAP, *unless_bit(2, _PROT_EXEC))
        when(calls.MPROTECT, *unless_bit(2, _PROT_EXEC))
    program.append(refuse)
    return b"".join(program)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _attempt(apply: Callable[[], int], name: str, reasons: list[str]) -> int:
    try:
        return apply()
    except OSError as error:
        reasons.append(f"{name}: {error.strerror}")
        return 0


def _restrict_files(libc: ctypes.CDLL) -> int:
    version = _call(libc, calls.LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_CREATE_RULESET_VERSION)
    handled = [
        sum(bits for since, bits in rights if version >= since)
        for rights in (_LANDLOCK_FS, _LANDLOCK_NET, _LANDLOCK_SCOPED)
    ]
    # struct landlock_ruleset_attr; an older kernel accepts a longer one if its end is zero.
    attr = struct.pack("=QQQ", *handled)
    ruleset = _call(libc, calls.LANDLOCK_CREATE_RULESET, attr, len(attr), 0)
    try:
        _call(libc, calls.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _filter(libc: ctypes.CDLL, *, loading: bool) -> int:
    architecture = calls.detect_architecture()
    if architecture is None:
        raise OSError(errno.ENOSYS, "no table of system calls for this architecture")
    number = architecture.number(calls.SECCOMP)
    assert number is not None
    program = filter_program(architecture, os.getpid(), loading=loading)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: count, padding, pointer.
    description = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    thread = _call(libc, number, _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, description)
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} could not take the filter")
    return 1


def _call(libc: ctypes.CDLL, number: int, *arguments: int | bytes | None) -> int:
    # Each is a C long, so that the upper half of every register is defined.
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = libc.syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _load(argument: int) -> bytes:
    # The lower half, which is first on a little-endian machine: only C ints are compared here.
    return _instruction(_LOAD, _ARGUMENT + 8 * argument)


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, jump_true, jump_false, k)
