"""Start the Python of a framework without files but its own, without network and other processes.

A program of its own, which `process.py` starts: it confines itself and becomes the framework's Python. A
model of TensorFlow may hold operators that write files, and an old Keras runs a model's code; with the
confinement, all of them work on a copy in a folder that is removed.

Promises: files can be read below the paths that were given, written below one folder; no socket can be made,
no signal be sent to another process, no process be inspected, no mode, owner or time of a file changed. All
of it holds for every process that the framework starts. Without Landlock or seccomp in the kernel, nothing is
started and the exit status is `UNCONFINED`.

Leaves to the framework's program: memory, whose limit it sets itself. Leaves to `process.py`: time.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from agent.confinement import bpf, landlock
from agent.confinement.architecture import Architecture, detect_architecture

UNCONFINED: Final = 96
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAPBSET_DROP: Final = 24
# What a framework reads beside its installation: libraries, time zones, names of users, the processor.
_SYSTEM: Final = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d",
    "/etc/alternatives", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group",
    "/etc/os-release", "/etc/mime.types", "/proc", "/sys/devices", "/sys/fs/cgroup", "/sys/kernel/mm",
    "/dev/urandom", "/dev/random", "/dev/zero",
)  # fmt: skip
_WRITABLE: Final = ("/dev/null",)
# name -> (x86-64, arm64): sockets, other processes and their memory, keys, and changes to files that are not
# opened for it, which Landlock does not see. io_uring does what a filter would refuse.
_REFUSED: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "socket": (41, 198), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "open_by_handle_at": (304, 265),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
# Signals to this process only: the number of the first process is also that of its thread group.
_KILL: Final = {"kill": (62, 129), "tgkill": (234, 131)}
_TKILL: Final = (200, 130)


def filter_program(architecture: Architecture, pid: int) -> bytes:
    """Return a filter that allows everything but what a model must not do.

    Parameters
    ----------
    architecture
        x86-64 or arm64.
    pid
        This process, the only one that may be sent signals.
    """
    refuse = bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.EPERM)
    allow = bpf.instruction(bpf.RETURN, bpf.RET_ALLOW)
    program = [
        bpf.instruction(bpf.LOAD, bpf.ARCH),
        bpf.instruction(bpf.JUMP_EQUAL, architecture.audit, 1, 0),
        bpf.instruction(bpf.RETURN, bpf.RET_KILL_PROCESS),
        bpf.instruction(bpf.LOAD, bpf.NR),
        # x32 calls have x86-64's architecture but other numbers.
        bpf.instruction(bpf.JUMP_AT_LEAST, bpf.X32_BIT, 0, 1),
        refuse,
    ]
    for numbers in (*_REFUSED.values(), _TKILL):
        number = numbers[architecture.column]
        if number is not None:
            program += [bpf.instruction(bpf.JUMP_EQUAL, number, 0, 1), refuse]
    for numbers in _KILL.values():
        own = [
            bpf.instruction(bpf.LOAD, bpf.ARGUMENT),
            bpf.instruction(bpf.JUMP_EQUAL, pid, 1, 0),
            refuse,
            allow,
        ]
        program += [bpf.instruction(bpf.JUMP_EQUAL, numbers[architecture.column], 0, len(own)), *own]
    return b"".join((*program, allow))


def confine(readable: list[Path], folder: Path) -> None:
    """Confine this process and all that it starts. This cannot be undone.

    Raises
    ------
    OSError
        If the kernel lacks Landlock or seccomp, or there is no table for this architecture.
    """
    architecture = detect_architecture()
    if architecture is None or architecture.name not in ("x86_64", "aarch64"):
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    # The next program of root has no capabilities, such as that to read the memory of other processes.
    for capability in range(64):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    landlock.restrict([*map(Path, _SYSTEM), *readable], [*map(Path, _WRITABLE), folder])
    bpf.install(filter_program(architecture, os.getpid()), architecture)


def main() -> None:
    """Confine this process to the folder and paths in the first argument, and become the others."""
    places = json.loads(sys.argv[1])
    command = sys.argv[2:]
    try:
        confine([Path(path) for path in places["read"]], Path(places["write"]))
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}\n")
        sys.exit(UNCONFINED)
    try:
        os.execv(command[0], command)  # noqa: S606 - a Python of the user's
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
