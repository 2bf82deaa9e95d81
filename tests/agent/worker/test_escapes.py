"""What a hostile model can try from inside the sandbox, as real system calls of a real process.

One process makes all attempts (`attacks.py`), beside a victim of the same user.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ATTACKS = Path(__file__).with_name("attacks.py")
REAL = (
    "F_SETOWN",
    "F_SETOWN_EX",
    "O_ASYNC of a pipe",
    "sched_setaffinity of another",
    "sched_setaffinity of itself",
    "setpriority",
    "prlimit of another",
    "position of the log",
    "O_NONBLOCK of the log",
    "reading the log",
    "lowering a limit",
    "catching SIGXCPU",
    "F_SETPIPE_SZ",
    "byte out of band",
)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def attack(victim: subprocess.Popen[bytes], log: Path, *options: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, str(ATTACKS), str(victim.pid), str(log), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, log.read_text() + done.stderr
    outcomes: dict[str, int] = json.loads(done.stdout)
    return outcomes


@pytest.mark.parametrize("options", [(), ("without-landlock",)], ids=["complete", "without-landlock"])
def test_nothing_that_reaches_beyond_the_process_succeeds(
    victim: subprocess.Popen[bytes], tmp_path: Path, options: tuple[str, ...]
) -> None:
    affinity = os.sched_getaffinity(victim.pid)
    limits = resource.prlimit(victim.pid, resource.RLIMIT_NOFILE)
    log = tmp_path / "log"
    outcomes = attack(victim, log, *options)
    needed = {name for name in outcomes if name.startswith("(")}
    assert {name: outcomes[name] for name in needed} == dict.fromkeys(needed, 0)
    # Refused by the filter, before the kernel looks at anything else.
    refused = {name: code for name, code in outcomes.items() if name not in needed}
    assert {name: code for name, code in refused.items() if code != errno.EPERM} == {"clone3": errno.ENOSYS}
    assert victim.poll() is None
    assert os.sched_getaffinity(victim.pid) == affinity
    assert resource.prlimit(victim.pid, resource.RLIMIT_NOFILE) == limits
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
    assert log.read_text() == "first line\nlast line\n"


def test_the_same_attacks_succeed_without_a_sandbox(victim: subprocess.Popen[bytes], tmp_path: Path) -> None:
    # Otherwise the test above could pass because its attacks are mistaken.
    assert attack(victim, tmp_path / "log", "open", *REAL) == dict.fromkeys(REAL, 0)


def test_the_signal_of_a_descriptor_really_kills_without_a_sandbox(
    victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    attack(victim, tmp_path / "log", "open", "F_SETOWN", "F_SETSIG", "O_ASYNC", "(echo)")
    assert victim.wait(PATIENCE_S) == -signal.SIGKILL
