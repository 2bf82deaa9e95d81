"""A bad machine: processes of a test run stand still for half a second, now and then.

`make test PYTEST_ARGS=--stalls` runs the tests on it. A test that fails there and not on a quiet machine
waits too briefly, or assumes that something has happened because some time has passed.

A virtual machine that its host does not run for a while, and a laptop with too much to do, look like this to
a test: all processes stop at once, or some of them while the others go on. Both happen here.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# A virtual machine with two processors was seen to do this a hundred times in ten minutes; here, 360 times.
STALL_S: Final = (0.3, 0.8)
PAUSE_S: Final = (0.2, 2.0)

# How often all processes of the run stop, and not only one in two of them.
WHOLE_SHARE: Final = 0.5


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the state of each process by its number; proc_pid_stat(5), fields 3 and 4."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                found[int(entry.name)] = (int(parent), state)
    return found


def descendants(root: int) -> list[int]:
    """Return the running processes below one, and itself, without this one."""
    known = processes()
    if root not in known:
        return []
    below = {root}
    while more := {pid for pid, (parent, _) in known.items() if parent in below} - below:
        below |= more
    # A process that a test has stopped must stay so.
    return [pid for pid in below if pid in known and known[pid][1] not in "TtZX" and pid != os.getpid()]


def stall(root: int, seed: int) -> None:
    """Stop processes of a run, and let them go on, until its first one has ended."""
    chance = random.Random(seed)
    while pids := descendants(root):
        if chance.random() > WHOLE_SHARE:
            pids = [pid for pid in pids if chance.random() < 0.5]
        stopped = []
        try:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    stopped.append(pid)
            time.sleep(chance.uniform(*STALL_S))
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(chance.uniform(*PAUSE_S))


@contextlib.contextmanager
def stalling(seed: int) -> Iterator[None]:
    """Let the processes of this run stand still now and then."""
    command = [sys.executable, "-m", "tests.stalls", str(os.getpid()), str(seed)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    # A signal must not leave others stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    stall(int(sys.argv[1]), int(sys.argv[2]))
