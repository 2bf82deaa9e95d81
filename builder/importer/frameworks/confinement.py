"""Start the Python of a framework without files but its own, without network and other processes.

A program of its own, which `process.py` starts: it confines itself and becomes the framework's Python. A
model of TensorFlow may hold operators that write files, and an old Keras runs a model's code; with the
confinement, all of them work on a copy in a folder that is removed.

Promises: files can be read below the paths that were given, written and emptied below one folder; no socket
can reach anybody, no signal be sent to another process, also by way of a descriptor's owner, no process be
inspected, limited or slowed down, no memory be shared with it, no mode, owner or time of a file changed. All
of it holds for every process that the framework starts, and none leaves its process group, which `process.py`
ends. Without Landlock or seccomp in the kernel, nothing is started and the exit status is `UNCONFINED`.

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
from itertools import chain
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
# opened for it, which Landlock does not see (`truncate` before Linux 6.2). io_uring does what a filter would
# refuse.
_REFUSED: Final[Mapping[str, tuple[int | None, int | None]]] = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "process_madvise": (440, 440),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "io_uring_setup": (425, 425),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "mount": (165, 40), "unshare": (272, 97),
    "setns": (308, 268), "open_by_handle_at": (304, 265), "setsid": (112, 157), "setpgid": (109, 154),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187),
    "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192), "semctl": (66, 191),
    "mq_open": (240, 180), "mq_unlink": (241, 181), "inotify_init": (253, None), "inotify_init1": (294, 26),
    "fanotify_init": (300, 262), "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
# Their arguments are behind a pointer; the C library then uses the older call.
_MISSING: Final = {"clone3": (435, 435), "openat2": (437, 437)}
# Signals to this process only: the number of the first process is also that of its thread group.
_KILL: Final = {"kill": (62, 129), "tgkill": (234, 131)}
_TKILL: Final = (200, 130)
# Limits and processors of this process only, which may call itself 0.
_OWN: Final = {"prlimit64": (302, 261), "sched_setaffinity": (203, 122)}
# name -> numbers, which argument, values that are refused. F_SETOWN, F_SETOWN_EX, F_SETLEASE, F_NOTIFY;
# FIOSETOWN, SIOCSPGRP: the kernel then sends signals to the process that they name, delays or reports others.
_VALUES: Final = {
    "fcntl": ((72, 25), 1, (8, 15, 1024, 1026)),
    "ioctl": ((16, 29), 1, (0x8901, 0x8902)),
}
# name -> numbers, which argument, bits that are refused: namespaces; a pair of sockets that is no stream, as
# datagrams may go to another address than the other end's.
_BITS: Final = {"clone": ((56, 220), 0, 0x7E020000), "socketpair": ((53, 199), 1, 0xE)}
# To empty a file without opening it for writing, which Landlock does not see before Linux 6.2.
_OPEN: Final = {"open": ((2, None), 1), "openat": ((257, 56), 2)}


def filter_program(architecture: Architecture, pid: int) -> bytes:
    """Return a filter that allows everything but what a model must not do.

    `architecture`: x86-64 or arm64.
    `pid`: this process, the only one that may be sent signals.
    """
    refuse = bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.EPERM)
    missing = bpf.instruction(bpf.RETURN, bpf.RET_ERRNO | errno.ENOSYS)
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

    def when(numbers: tuple[int | None, int | None], *then: bytes) -> None:
        number = numbers[architecture.column]
        if number is not None:
            program.extend((bpf.instruction(bpf.JUMP_EQUAL, number, 0, len(then)), *then))

    for numbers in (*_REFUSED.values(), _TKILL):
        when(numbers, refuse)
    for numbers in _MISSING.values():
        when(numbers, missing)
    for numbers in _KILL.values():
        when(numbers, _load(0), bpf.instruction(bpf.JUMP_EQUAL, pid, 1, 0), refuse, allow)
    for numbers in _OWN.values():
        own = (bpf.instruction(bpf.JUMP_EQUAL, pid, 2, 0), bpf.instruction(bpf.JUMP_EQUAL, 0, 1, 0))
        when(numbers, _load(0), *own, refuse, allow)
    for numbers, argument, values in _VALUES.values():
        tests = ((bpf.instruction(bpf.JUMP_EQUAL, value, 0, 1), refuse) for value in values)
        when(numbers, _load(argument), *chain.from_iterable(tests), allow)
    for numbers, argument, bits in _BITS.values():
        when(numbers, _load(argument), bpf.instruction(bpf.JUMP_ANY_BIT, bits, 0, 1), refuse, allow)
    for open_numbers, argument in _OPEN.values():
        emptied = (
            bpf.instruction(bpf.JUMP_ANY_BIT, os.O_TRUNC, 0, 4),
            bpf.instruction(bpf.JUMP_ANY_BIT, os.O_WRONLY, 0, 1),
            bpf.instruction(bpf.JUMP_ANY_BIT, os.O_RDWR, 1, 2),
            bpf.instruction(bpf.JUMP_ANY_BIT, os.O_RDWR, 1, 0),
        )
        when(open_numbers, _load(argument), *emptied, refuse, allow)
    return b"".join((*program, allow))


def _load(argument: int) -> bytes:
    """Load the lower half of an argument."""
    return bpf.instruction(bpf.LOAD, bpf.ARGUMENT + 8 * argument)


def confine(readable: list[Path], folder: Path) -> None:
    """Confine this process and all that it starts. This cannot be undone.

    Raises `OSError` if the kernel lacks Landlock or seccomp, or there is no table for this architecture.
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
