"""The sandbox that a worker puts itself into before it runs a model's native code.

Promises, on a kernel that has them: resource limits that it cannot change; no new privileges; Landlock
without any rule, so that no path can be opened (memory files have no path); a filter for every thread that
allows the system calls listed in `system_calls`, checks their arguments, and refuses all others with EPERM;
new threads only if the agent allows them. All imports must be done before it is closed. If the kernel lacks a
part, the rest is applied all the same, and the status says so.

Leaves to the agent: how many threads there may be (`thread_gate`), processors and processor time
(`worker_process`).

The sandbox is closed in two steps: `close_files` before the model's library is mapped, because its
constructors are native code; then `close_loading`, which also forbids what the dynamic linker needs: opening
files, and new executable memory.

References: linux/landlock.h, linux/seccomp.h, linux/filter.h; Documentation/userspace-api/landlock.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.worker import system_calls as calls
from agent.worker.frames import SANDBOX_REPORT
from agent.worker.system_calls import Architecture, Numbers, Rule

_PR_SET_NO_NEW_PRIVS: Final = 38

_PR_SET_PDEATHSIG: Final = 1

_LANDLOCK_CREATE_RULESET_VERSION: Final = 1
# Rights that Landlock handles, and so refuses, each with the version of the ABI that introduced them.
_LANDLOCK_FS: Final = ((1, 0x1FFF), (2, 1 << 13), (3, 1 << 14), (5, 1 << 15))
_LANDLOCK_NET: Final = ((4, 0b11),)
_LANDLOCK_SCOPED: Final = ((6, 0b11),)

_SECCOMP_SET_MODE_FILTER: Final = 1
_FLAG_TSYNC: Final = 1
_FLAG_NEW_LISTENER: Final = 8
# With a listener the result is its descriptor, so a thread that cannot take the filter is told by an errno.
_FLAG_TSYNC_ESRCH: Final = 16
_RET_ALLOW: Final = 0x7FFF0000
_RET_KILL_PROCESS: Final = 0x80000000
_RET_ERRNO: Final = 0x00050000
_RET_USER_NOTIF: Final = 0x7FC00000

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

# As if it used half of the memory more; see proc_pid_oom_score_adj(5).
_OOM_SCORE: Final = "500"
# Soft and hard limits of the process, which its filter keeps it from changing.
_LIMITS: Final = (
    # A core file would contain the model's memory.
    (resource.RLIMIT_CORE, 0),
    # The channel, the standard streams, the bundle's members, and files that imports may have left open.
    (resource.RLIMIT_NOFILE, 64),
    # It can write no regular file but the log of somebody who starts it by hand.
    (resource.RLIMIT_FSIZE, 64 << 20),
    # What programs get by default; a model declares no stack.
    (resource.RLIMIT_STACK, 8 << 20),
    # Signals that wait for it are counted for the agent's user; it needs none that queue.
    (resource.RLIMIT_SIGPENDING, 64),
    # Memory that cannot be swapped, message queues, and priorities above the others.
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
    (resource.RLIMIT_NICE, 0),
    (resource.RLIMIT_RTPRIO, 0),
)


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
    threads
        Whether the agent is asked for each new thread.
    reasons
        Why a part is not in force.
    """

    landlock: int
    seccomp: bool
    threads: bool
    reasons: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether all are in force."""
        return self.landlock > 0 and self.seccomp and self.threads

    def __str__(self) -> str:
        landlock = f"landlock {self.landlock}" if self.landlock else "no landlock"
        seccomp = "seccomp" if self.seccomp else "no seccomp"
        threads = "bounded threads" if self.threads else "unbounded threads"
        return ", ".join((landlock, seccomp, threads, *self.reasons))


def close_files(limits: Limits, gate: socket.socket | None = None) -> Status:
    """Limit the process, and forbid files, network and other processes. This cannot be undone.

    Parameters
    ----------
    gate
        The agent is told what is in force at its end of it, and decides there about each new thread; None
        without an agent.

    Returns
    -------
    Status
        The parts that the kernel put in force.

    Raises
    ------
    OSError
        If a resource limit or no-new-privileges is refused, which no supported kernel does.
    """
    for kind, value in _LIMITS:
        _limit(kind, value)
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
    listener = 0 if gate is None else _attempt(lambda: _filter_and_ask(libc), "threads", reasons)
    seccomp = listener > 0 or bool(_attempt(lambda: _filter(libc, loading=True), "seccomp", reasons))
    if gate is not None:
        _report(gate, landlock, seccomp=seccomp, listener=listener)
    return Status(landlock, seccomp, listener > 0, tuple(reasons))


def close_loading(status: Status) -> None:
    """Forbid what only loading needed: opening files, and new executable memory.

    Raises
    ------
    OSError
        If the kernel refuses, although it accepted the first filter.
    """
    if status.seccomp:
        _filter(ctypes.CDLL(None, use_errno=True), loading=False)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, whatever a model does by then.

    Otherwise a model that holds on to the process would survive an agent that was killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def be_first_when_memory_runs_out() -> None:
    """Let the kernel end this process before the agent when there is no memory left."""
    # Without /proc, or with one that cannot be written, the kernel chooses by size.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def limit_cpu(budget_s: int) -> None:
    """Let the kernel end this process (SIGXCPU) after `budget_s` more processor seconds.

    The agent allows more from time to time; the process itself cannot, once its sandbox is closed.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # The limit counts whole seconds; the current one does not count.
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + budget_s, hard))


def filter_program(architecture: Architecture, pid: int, *, loading: bool, ask: bool = False) -> bytes:
    """Return the filter as classic BPF.

    Parameters
    ----------
    pid
        This process, the only one that may be sent signals.
    loading
        Whether a library must still be mapped.
    ask
        Whether a listener decides about new threads.
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

    for numbers in calls.ALLOWED.values():
        when(numbers, _ALLOW)
    checked = {**calls.CHECKED, **(calls.LOADING if loading else calls.SERVING)}
    allow_thread = _instruction(_RETURN, _RET_USER_NOTIF) if ask else _ALLOW
    for call, allow in (*((each, _ALLOW) for each in checked.values()), (calls.CLONE, allow_thread)):
        when(call.numbers, *(each for rule in call.rules for each in _refuse_unless(rule, pid)), allow)
    when(calls.CLONE3, _instruction(_RETURN, _RET_ERRNO | errno.ENOSYS))
    program.append(_REFUSE)
    return b"".join(program)


def _refuse_unless(rule: Rule, pid: int) -> tuple[bytes, ...]:
    """Return instructions that refuse a call which breaks the rule, and else go on behind themselves."""
    low = _load(rule.argument)
    match rule:
        case calls.OneOf(_, values):
            tests = (_instruction(_JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values))
            return low, *tests, _REFUSE
        case calls.NoneOf(_, values):
            last = len(values) - 1
            tests = (
                _instruction(_JUMP_EQUAL, value, last - i, int(i == last)) for i, value in enumerate(values)
            )
            return low, *tests, _REFUSE
        case calls.AtLeast(_, value):
            return low, _instruction(_JUMP_AT_LEAST, value, 1, 0), _REFUSE
        case calls.Without(_, bits):
            return low, _instruction(_JUMP_ANY_BIT, bits, 0, 1), _REFUSE
        case calls.Null():
            high = _instruction(_LOAD, _ARGUMENT + 8 * rule.argument + 4)
            zero = _instruction(_JUMP_EQUAL, 0, 1, 0)
            return low, zero, _REFUSE, high, zero, _REFUSE
        case calls.OwnProcess():
            return low, _instruction(_JUMP_EQUAL, pid, 1, 0), _REFUSE


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
    thread = _set_filter(libc, _FLAG_TSYNC, loading=loading, ask=False)
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} could not take the filter")
    return 1


def _filter_and_ask(libc: ctypes.CDLL) -> int:
    return _set_filter(libc, _FLAG_TSYNC | _FLAG_TSYNC_ESRCH | _FLAG_NEW_LISTENER, loading=True, ask=True)


def _report(gate: socket.socket, landlock: int, *, seccomp: bool, listener: int) -> None:
    """Tell the agent what is in force, and hand the listener over, while no code of a model has run."""
    try:
        # Without an agent that takes the listener, the kernel refuses every thread.
        socket.send_fds(gate, [SANDBOX_REPORT.pack(landlock, seccomp)], [listener] if listener else [])
    finally:
        if listener:
            # The model must not answer for the agent.
            os.close(listener)


def _set_filter(libc: ctypes.CDLL, flags: int, *, loading: bool, ask: bool) -> int:
    architecture = calls.detect_architecture()
    if architecture is None:
        raise OSError(errno.ENOSYS, "no table of system calls for this architecture")
    number = architecture.number(calls.LOADING["seccomp"].numbers)
    assert number is not None
    program = filter_program(architecture, os.getpid(), loading=loading, ask=ask)
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: count, padding, pointer.
    description = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    return _call(libc, number, _SECCOMP_SET_MODE_FILTER, flags, description)


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


_ALLOW: Final = _instruction(_RETURN, _RET_ALLOW)
_REFUSE: Final = _instruction(_RETURN, _RET_ERRNO | errno.EPERM)
