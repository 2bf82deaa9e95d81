"""Tries actions that the unit should refuse or allow, and prints as JSON which of them succeeded.

The test runs it in the service's own unit, with another ExecStart, and as root without the unit.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
MAP_FAILED = ctypes.c_void_p(-1).value
CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219}[platform.machine()]
# These numbers are the same on every architecture.
SYS_IO_URING_SETUP, SYS_LANDLOCK_CREATE_RULESET = 425, 444


def call(status: int) -> None:
    if status < 0:
        raise OSError(ctypes.get_errno(), "refused")


def write(path: str) -> None:
    Path(path).write_text("")
    Path(path).unlink()


def write_and_execute_memory() -> None:
    protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    if libc.mmap(None, 4096, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0) == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "refused")


def make_memory_executable() -> None:
    memory = libc.mmap(
        None, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    call(libc.mprotect(ctypes.c_void_p(memory), 4096, mmap.PROT_READ | mmap.PROT_EXEC))


def map_memory_file_executable() -> None:
    descriptor = os.memfd_create("probe")
    os.write(descriptor, b"\0" * 4096)
    if libc.mmap(None, 4096, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, descriptor, 0) == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "refused")


def run_own_program() -> None:
    path = Path("/var/lib/edge-agent/probe.sh")
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    try:
        subprocess.run([path], check=True)
    finally:
        path.unlink()


def see_process_one() -> None:
    Path("/proc/1/cmdline").read_bytes()


def unshare(flags: int) -> Callable[[], None]:
    def child() -> None:
        # In a child: new namespaces in the parent would distort the later actions.
        pid = os.fork()
        if pid == 0:
            os._exit(0 if libc.unshare(flags) == 0 else 1)
        if os.waitpid(pid, 0)[1]:
            raise PermissionError("refused")

    return child


def callback() -> None:
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    assert kind(lambda value: value + 1)(1) == 2


def filter_own_calls() -> None:
    # SECCOMP_GET_ACTION_AVAIL of SECCOMP_RET_ERRNO: asks whether filters work, without setting one.
    number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    call(libc.syscall(number, 2, 0, ctypes.byref(ctypes.c_uint32(0x00050000))))


ACTIONS: dict[str, Callable[[], object]] = {
    "write /etc": lambda: write("/etc/probe"),
    "write /usr": lambda: write("/usr/probe"),
    "write /home": lambda: write("/home/probe"),
    "write the keyring": lambda: write("/etc/edge-agent/keyring/probe"),
    "write /proc/sys": lambda: Path("/proc/sys/kernel/domainname").write_text("probe"),
    "read /etc/shadow": lambda: Path("/etc/shadow").read_bytes(),
    "see other processes": see_process_one,
    "netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0),
    "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0),
    "new user namespace": unshare(CLONE_NEWUSER),
    "new network namespace": unshare(CLONE_NEWNET),
    "mount": lambda: call(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)),
    "become root": lambda: os.setuid(0),
    "give files away": lambda: os.chown("/tmp", 1, 1),
    "real-time priority": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "32-bit personality": lambda: call(libc.personality(0x0008)),
    "keyring of the kernel": lambda: call(libc.syscall(SYS_KEYCTL, 0, -3, 1)),
    "io_uring": lambda: call(libc.syscall(SYS_IO_URING_SETUP, 1, ctypes.create_string_buffer(120))),
    "writable and executable memory": write_and_execute_memory,
    "memory made executable": make_memory_executable,
    "run a written program": run_own_program,
    "write the state": lambda: write("/var/lib/edge-agent/probe"),
    "write the runtime folder": lambda: write("/run/edge-agent/probe"),
    "write /tmp": lambda: write("/tmp/probe"),
    "read the configuration": lambda: Path("/etc/edge-agent/agent.toml").read_bytes(),
    "read cpuinfo": lambda: Path("/proc/cpuinfo").read_bytes(),
    "read meminfo": lambda: Path("/proc/meminfo").read_bytes(),
    "internet socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "unix sockets": socket.socketpair,
    "affinity": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "executable mapping of a memory file": map_memory_file_executable,
    "callbacks of ctypes": callback,
    "seccomp": filter_own_calls,
    # Flag LANDLOCK_CREATE_RULESET_VERSION.
    "landlock": lambda: call(libc.syscall(SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)),
}


def main() -> None:
    """Try all actions and print which ones succeeded."""
    results = {}
    for name, action in ACTIONS.items():
        try:
            action()
        except (OSError, subprocess.CalledProcessError):
            results[name] = False
        else:
            results[name] = True
    json.dump(results, sys.stdout)
    sys.stdout.write("\n")


main()
