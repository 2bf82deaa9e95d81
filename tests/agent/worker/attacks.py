"""A hostile process: closes a worker's sandbox around itself, then attacks others and its limits.

`python attacks.py VICTIM LOG [without-landlock]` prints one JSON object: the errno of each attack, 0 where it
succeeded. `without-landlock` is a kernel that has no Landlock, or one without a scope for signals: only the
filter of system calls is left. `open NAME ...` makes these attacks without a sandbox.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable

from agent.confinement import landlock
from agent.worker import sandbox

victim = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
ours, theirs = socket.socketpair()
read_end, write_end = os.pipe()
log = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
os.write(log, b"first line\n")
os.dup2(log, 2)
# (x86-64, arm64) of what no table of ours has.
NUMBERS = {
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "ioctl": (16, 29),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "timer_create": (222, 107),
    "timerfd_create": (283, 85),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "personality": (135, 92),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    "mlockall": (151, 230),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "pipe2": (293, 59),
    "dup": (32, 23),
    "dup3": (292, 24),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "fallocate": (285, 47),
    "ftruncate": (77, 46),
    "fsync": (74, 82),
    "pwrite64": (18, 68),
    "flock": (73, 32),
    "setsid": (112, 157),
    "setpgid": (109, 154),
    "setuid": (105, 146),
    "capset": (126, 91),
    "unshare": (272, 97),
    "setns": (308, 268),
    "wait4": (61, 260),
    "prctl": (157, 167),
    "kcmp": (312, 272),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "futex_waitv": (449, 449),
    "clone3": (435, 435),
    "clone": (56, 220),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "socketpair": (53, 199),
    "recvmsg": (47, 212),
    "tgkill": (234, 131),
    "prlimit64": (302, 261),
    "rt_sigaction": (13, 134),
}
COLUMN = {"x86_64": 0, "aarch64": 1}[platform.machine()]
ONE_PROCESSOR = struct.pack("=Q", 1)
LIMIT = struct.pack("=QQ", 1 << 40, 1 << 40)


def check(result: int | None) -> None:
    if result is None or result < 0:
        raise OSError(ctypes.get_errno(), "refused")


def system(name: str, *arguments: int | bytes) -> Callable[[], None]:
    number = NUMBERS[name][COLUMN]
    values = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    values += [ctypes.c_long(0)] * (6 - len(values))
    return lambda: check(libc.syscall(ctypes.c_long(number), *values))


def descriptor(command: int, value: int = 0, fd: int | None = None) -> Callable[[], object]:
    return lambda: fcntl.fcntl(ours.fileno() if fd is None else fd, command, value)


def map_memory(protection: int, flags: int) -> Callable[[], None]:
    def attempt() -> None:
        if libc.mmap(None, 1 << 21, protection, flags, -1, 0) == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "refused")

    return attempt


def start_thread() -> None:
    try:
        threading.Thread(target=lambda: None).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error


F_SETOWN_EX, F_SETSIG, F_NOTIFY, F_SETPIPE_SZ, F_ADD_SEALS = 15, 10, 1026, 1031, 1033
ATTACKS: dict[str, Callable[[], object]] = {
    # Signals to another process, straight or by way of a descriptor.
    "kill": lambda: os.kill(victim, 0),
    "kill everybody": lambda: os.kill(-1, 0),
    "kill the group": lambda: os.kill(0, 0),
    "tgkill": system("tgkill", victim, victim, 0),
    "tkill": system("tkill", victim, 0),
    "rt_sigqueueinfo": system("rt_sigqueueinfo", victim, 0, bytes(128)),
    "rt_tgsigqueueinfo": system("rt_tgsigqueueinfo", victim, victim, 0, bytes(128)),
    "pidfd_open": system("pidfd_open", victim, 0),
    "pidfd_send_signal": system("pidfd_send_signal", read_end, 0, 0, 0),
    "pidfd_getfd": system("pidfd_getfd", read_end, 0, 0),
    "F_SETOWN": descriptor(fcntl.F_SETOWN, victim),
    "F_SETOWN_EX": lambda: check(libc.fcntl(ours.fileno(), F_SETOWN_EX, struct.pack("=ii", 1, victim))),
    "F_SETSIG": descriptor(F_SETSIG, signal.SIGKILL),
    "O_ASYNC": descriptor(fcntl.F_SETFL, fcntl.FASYNC),
    "O_ASYNC of a pipe": descriptor(fcntl.F_SETFL, fcntl.FASYNC, read_end),
    "FIOASYNC": system("ioctl", ours.fileno(), 0x5452, struct.pack("=i", 1)),
    "FIOSETOWN": system("ioctl", ours.fileno(), 0x8901, struct.pack("=i", victim)),
    "SIOCSPGRP": system("ioctl", ours.fileno(), 0x8902, struct.pack("=i", victim)),
    "TIOCSTI": system("ioctl", 2, 0x5412, b"x"),
    "F_NOTIFY": descriptor(F_NOTIFY, 1),
    "F_SETLEASE": descriptor(fcntl.F_SETLEASE, fcntl.F_RDLCK, log),
    "timer_create": system("timer_create", 0, 0, bytes(8)),
    "timerfd_create": system("timerfd_create", 1, 0),
    # Where and how fast other processes run.
    "sched_setaffinity of another": lambda: os.sched_setaffinity(victim, {0}),
    "sched_setaffinity of itself": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
    "sched_setscheduler": system("sched_setscheduler", victim, 3, struct.pack("=i", 0)),
    "sched_setattr": system("sched_setattr", victim, bytes(56), 0),
    "setpriority": system("setpriority", 0, victim, 19),
    "ioprio_set": system("ioprio_set", 1, victim, 3 << 13),
    "prlimit of another": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE, (8, 8)),
    "reading another's limits": lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE),
    "membarrier of all processes": system("membarrier", 1, 0),
    "move_pages": system("move_pages", victim, 0, 0, 0, 0, 0),
    "migrate_pages": system("migrate_pages", victim, 8, bytes(8), bytes(8)),
    "mbind": system("mbind", 0, 0, 0, 0, 0, 0),
    "set_mempolicy": system("set_mempolicy", 0, 0, 0),
    # Memory and state of other processes.
    "ptrace": system("ptrace", 16, victim, 0, 0),
    "process_vm_readv": system("process_vm_readv", victim, bytes(16), 1, bytes(16), 1, 0),
    "process_vm_writev": system("process_vm_writev", victim, bytes(16), 1, bytes(16), 1, 0),
    "process_madvise": system("process_madvise", read_end, bytes(16), 1, 21, 0),
    "perf_event_open": system("perf_event_open", bytes(128), victim, -1, -1, 0),
    "kcmp": system("kcmp", victim, victim, 0, 0, 0),
    "open /proc of another": lambda: os.open(f"/proc/{victim}/mem", os.O_RDONLY),
    "PR_SET_PTRACER": system("prctl", 0x59616D61, victim),
    "PR_SET_CHILD_SUBREAPER": system("prctl", 36, 1),
    "PR_SET_PDEATHSIG": system("prctl", 1, 9),
    "wait4": system("wait4", -1, 0, 1, 0),
    # Things that outlive the process, or that others share.
    "shmget": system("shmget", 0, 4096, 0o1600),
    "semget": system("semget", 0, 1, 0o1600),
    "msgget": system("msgget", 0, 0o1600),
    "mq_open": system("mq_open", b"x\0", 0o100 | 2, 0o600, 0),
    "add_key": system("add_key", b"user\0", b"x\0", b"y", 1, -3),
    "keyctl": system("keyctl", 0, -3, 1),
    "bpf": system("bpf", 0, bytes(128), 128),
    "io_uring_setup": system("io_uring_setup", 1, bytes(120)),
    "userfaultfd": system("userfaultfd", 1),
    "inotify_init1": system("inotify_init1", 0),
    "fanotify_init": system("fanotify_init", 0, 0),
    "personality": system("personality", 0x40000),
    "unshare": system("unshare", 0x10000000),
    "setns": system("setns", read_end, 0),
    "setsid": system("setsid"),
    "setpgid": system("setpgid", victim, 0),
    "setuid": system("setuid", 0),
    "capset": system("capset", bytes(8), bytes(24)),
    "reboot": system("reboot", 0, 0, 0, 0),
    "quotactl": system("quotactl", 0, 0, 0, 0),
    # Descriptors that it shares with the agent.
    "O_NONBLOCK of the log": descriptor(fcntl.F_SETFL, os.O_NONBLOCK, 2),
    "position of the log": lambda: os.lseek(2, 0, os.SEEK_SET),
    "lock of the log": lambda: fcntl.lockf(2, fcntl.LOCK_EX | fcntl.LOCK_NB),
    "flock of the log": system("flock", 2, 6),
    "reading the log": lambda: os.read(2, 1),
    "copy of the log's descriptor": descriptor(fcntl.F_DUPFD_CLOEXEC, 10, 2),
    "dup": system("dup", 2),
    "dup3": system("dup3", 2, 40, 0),
    "ftruncate": system("ftruncate", log, 0),
    "fallocate": system("fallocate", log, 0, 0, 1 << 30),
    "pwrite": system("pwrite64", log, b"x", 1, 1 << 30),
    "fsync": system("fsync", log),
    "splice": system("splice", read_end, 0, ours.fileno(), 0, 1, 2),
    "F_SETPIPE_SZ": descriptor(F_SETPIPE_SZ, 1 << 20, write_end),
    "F_ADD_SEALS": descriptor(F_ADD_SEALS, 1, log),
    "byte out of band": lambda: ours.send(b"x", socket.MSG_OOB),
    "message out of band": lambda: ours.sendmsg([b"x"], [], socket.MSG_OOB),
    "receiving descriptors": lambda: ours.recvmsg(1, 1024, socket.MSG_DONTWAIT),
    # Processes, threads and memory.
    "fork": os.fork,
    # Without CLONE_SIGHAND the kernel would answer EINVAL, so that nothing starts if the filter lets it pass.
    "thread that is traced": system("clone", (0x3D0F00 | 0x2000) & ~0x800, 0),
    "thread that shares no memory": system("clone", 0x10000, 0),
    "clone3": system("clone3", bytes(88), 88),
    "memfd_create": system("memfd_create", b"x\0", 0),
    "memfd_secret": system("memfd_secret", 0),
    "pipe2": system("pipe2", bytes(8), 0),
    "socketpair": system("socketpair", 1, 1, 0, bytes(8)),
    "eventfd2": system("eventfd2", 0, 0),
    "epoll_create1": system("epoll_create1", 0),
    "mlockall": system("mlockall", 3),
    "futex_waitv": system("futex_waitv", 0, 0, 0, 0, 0),
    "huge pages": map_memory(3, 0x22 | 0x40000),
    "merged pages": system("madvise", 0, 4096, 12),
    "swapped pages": system("madvise", 0, 4096, 21),
    "locked pages": map_memory(3, 0x22 | 0x2000),
    # Its own limits.
    "raising the limit of processor time": lambda: resource.setrlimit(resource.RLIMIT_CPU, (1 << 30, -1)),
    "lowering a limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8)),
    "prlimit of itself": system("prlimit64", 0, 0, LIMIT, 0),
    "prlimit of itself by number": lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CPU),
    "catching SIGXCPU": system("rt_sigaction", signal.SIGXCPU, bytes(32), 0, 8),
    # What a worker needs, which must succeed.
    "(thread)": start_thread,
    "(signal itself)": lambda: os.kill(os.getpid(), 0),
    "(read own limit)": lambda: resource.getrlimit(resource.RLIMIT_CPU),
    "(flags of a descriptor)": descriptor(fcntl.F_GETFL),
    "(memory)": map_memory(3, 0x22),
    "(write the log)": lambda: os.write(2, b"last line\n"),
    "(send)": lambda: ours.sendmsg([b"x"]),
    "(receive)": lambda: theirs.recv(1),
    "(echo)": lambda: theirs.sendmsg([b"x"]),
}


def outcome(attack: Callable[[], object]) -> int:
    try:
        attack()
    except OSError as error:
        return error.errno or -1
    except ValueError:
        # The module `resource` says it so.
        return errno.EPERM
    return 0


def main() -> None:
    """Attack, and print what came of it."""
    options = sys.argv[3:]
    chosen = ATTACKS
    if "open" in options:
        chosen = {name: ATTACKS[name] for name in options[1:]}
    else:
        if "without-landlock" in options:

            def absent() -> int:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

            vars(landlock)["restrict"] = absent
        status = sandbox.close_files(sandbox.Limits())
        sandbox.close_loading(status)
    print(json.dumps({name: outcome(attack) for name, attack in chosen.items()}))


main()
