"""The sandbox that a worker puts itself into before it runs a model's native code.

Promises, on a kernel that has them: resource limits that it cannot change; no new privileges; Landlock
without any rule, so that no path can be opened (memory files have no path); a filter for every thread that
allows the system calls listed in `system_calls`, checks their arguments, and refuses all others with EPERM;
new threads only if the agent allows them. All imports must be done before it is closed. If the kernel lacks a
part, the rest is still applied, and the status says so.

Leaves to the agent: how many threads there may be (`thread_gate`), processors and processor time
(`worker_process`).

The sandbox is closed in two steps: `close_files` before the model's library is mapped, because its
constructors are native code; then `close_loading`, which also forbids what the dynamic linker needs: opening
files, and new executable memory.

The filter is built with `agent.confinement.bpf`; files are refused with `agent.confinement.landlock`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.confinement import bpf
from agent.confinement import landlock as landlock_rules
from agent.confinement.architecture import Architecture, Numbers, detect_architecture
from agent.worker import system_calls as calls
from agent.worker.frames import SANDBOX_REPORT
from agent.worker.system_calls import Rule

_PR_SET_NO_NEW_PRIVS: Final = 38

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15

_FLAG_TSYNC: Final = 1
_FLAG_NEW_LISTENER: Final = 8
# With a listener the result is its descriptor, so a thread that cannot take the filter is told by an errno.
_FLAG_TSYNC_ESRCH: Final = 16

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
    landlock = _attempt(landlock_rules.restrict, "landlock", reasons)
    if threads > 1:
        # Landlock applies to the calling thread and those it starts, but an import has started others.
        reasons.append(f"{threads - 1} threads without landlock")
        landlock = 0
    listener = 0 if gate is None else _attempt(_filter_and_ask, "threads", reasons)
    seccomp = listener > 0 or bool(_attempt(lambda: _filter(loading=True), "seccomp", reasons))
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
        _filter(loading=False)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, whatever a model does by then.

    Otherwise a model that holds on to the process would survive an agent that was killed.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


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
        bpf.instruction(bpf.LOAD, bpf.ARCH),
        bpf.instruction(bpf.JUMP_EQUAL, architecture.audit, 1, 0),
        bpf.instruction(bpf.RETURN, bpf.RET_KILL_PROCESS),
        bpf.instruction(bpf.LOAD, bpf.NR),
        # x32 calls have x86-64's architecture but other numbers.
        bpf.instruction(bpf.JUMP_AT_LEAST, bpf.X32_BIT, 0, 1),
        bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.EPERM),
    ]

    def when(numbers: Numbers, *then: bytes) -> None:
        number = architecture.number(numbers)
        if number is not None:
            program.extend((bpf.instruction(bpf.JUMP_EQUAL, number, 0, len(then)), *then))

    for numbers in calls.ALLOWED.values():
        when(numbers, _ALLOW)
    checked = {**calls.CHECKED, **(calls.LOADING if loading else calls.SERVING)}
    allow_thread = bpf.instruction(bpf.RETURN, bpf.RET_USER_NOTIF) if ask else _ALLOW
    for call, allow in (*((each, _ALLOW) for each in checked.values()), (calls.CLONE, allow_thread)):
        when(call.numbers, *(each for rule in call.rules for each in _refuse_unless(rule, pid)), allow)
    when(calls.CLONE3, bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.ENOSYS))
    program.append(_REFUSE)
    return b"".join(program)


def _refuse_unless(rule: Rule, pid: int) -> tuple[bytes, ...]:
    """Return instructions that refuse a call which breaks the rule, and else go on behind themselves."""
    low = _load(rule.argument)
    match rule:
        case calls.OneOf(_, values):
            tests = (
                bpf.instruction(bpf.JUMP_EQUAL, value, len(values) - i, 0) for i, value in enumerate(values)
            )
            return low, *tests, _REFUSE
        case calls.NoneOf(_, values):
            last = len(values) - 1
            tests = (
                bpf.instruction(bpf.JUMP_EQUAL, value, last - i, int(i == last))
                for i, value in enumerate(values)
            )
            return low, *tests, _REFUSE
        case calls.AtLeast(_, value):
            return low, bpf.instruction(bpf.JUMP_AT_LEAST, value, 1, 0), _REFUSE
        case calls.Without(_, bits):
            return low, bpf.instruction(bpf.JUMP_ANY_BIT, bits, 0, 1), _REFUSE
        case calls.Null():
            high = bpf.instruction(bpf.LOAD, bpf.ARGUMENT + 8 * rule.argument + 4)
            zero = bpf.instruction(bpf.JUMP_EQUAL, 0, 1, 0)
            return low, zero, _REFUSE, high, zero, _REFUSE
        case calls.OwnProcess():
            return low, bpf.instruction(bpf.JUMP_EQUAL, pid, 1, 0), _REFUSE


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


def _filter(*, loading: bool) -> int:
    thread = _set_filter(_FLAG_TSYNC, loading=loading, ask=False)
    if thread:
        raise OSError(errno.EBUSY, f"thread {thread} could not take the filter")
    return 1


def _filter_and_ask() -> int:
    return _set_filter(_FLAG_TSYNC | _FLAG_TSYNC_ESRCH | _FLAG_NEW_LISTENER, loading=True, ask=True)


def _report(gate: socket.socket, landlock: int, *, seccomp: bool, listener: int) -> None:
    """Tell the agent what is in force, and hand the listener over, while no code of a model has run."""
    try:
        # Without an agent that takes the listener, the kernel refuses every thread.
        socket.send_fds(gate, [SANDBOX_REPORT.pack(landlock, seccomp)], [listener] if listener else [])
    finally:
        if listener:
            # The model must not answer for the agent.
            os.close(listener)


def _set_filter(flags: int, *, loading: bool, ask: bool) -> int:
    architecture = detect_architecture()
    if architecture is None:
        raise OSError(errno.ENOSYS, "no table of system calls for this architecture")
    program = filter_program(architecture, os.getpid(), loading=loading, ask=ask)
    return bpf.install(program, architecture, flags)


def _load(argument: int) -> bytes:
    # The lower half, which is first on a little-endian machine: only C ints are compared here.
    return bpf.instruction(bpf.LOAD, bpf.ARGUMENT + 8 * argument)


_ALLOW: Final = bpf.instruction(bpf.RETURN, bpf.RET_ALLOW)
_REFUSE: Final = bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.EPERM)
