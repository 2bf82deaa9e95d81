"""Processes for a `WorkerProcess` that are not forks of the template, and forks without an agent."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.service.models.template import template_command
from agent.service.models.worker_process import Launch
from agent.worker.frames import FORK_REPLY
from tests.patience import PATIENCE_S

PROJECT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
prctl = ctypes.CDLL(None).prctl


def executed(command: Sequence[str]) -> Launch:
    """Run a command, to which the numbers of the channel's and the gate's descriptors are appended."""

    async def launch(descriptors: Sequence[int]) -> int:
        channel, log, gate = descriptors
        process = subprocess.Popen(
            [*command, str(channel), str(gate)],
            pass_fds=(channel, gate),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(PROJECT))},
            cwd="/",
            start_new_session=True,
        )
        # `WorkerProcess` reaps it.
        process.returncode = 0
        return process.pid

    return launch


class Forked:
    """A worker whose parent is this process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def wait(self, timeout: float = PATIENCE_S) -> int:
        """Return its status when it has ended, as `subprocess` has it."""
        end_s = time.monotonic() + timeout
        while self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end_s:
                raise TimeoutError(f"process {self.pid} does not end")
            else:
                time.sleep(0.001)
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it is gone."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it is gone."""
        self.send_signal(signal.SIGKILL)


@contextmanager
def template(command: Sequence[str] = template_command()) -> Iterator[tuple[socket.socket, int]]:
    """Run a template; yield the socket to it, and its process id."""
    # Only as long as workers are forked: what other tests leave behind is init's.
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.settimeout(PATIENCE_S)
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(PROJECT))},
            )
        try:
            assert FORK_REPLY.unpack(ours.recv(FORK_REPLY.size)) == (0,)
            yield ours, process.pid
        finally:
            process.kill()
            process.wait()
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def fork(connection: socket.socket, descriptors: Sequence[int]) -> Forked:
    """Let a template fork a worker with these descriptors: channel, standard error, and a gate or none."""
    socket.send_fds(connection, [b"f"], list(descriptors))
    (pid,) = FORK_REPLY.unpack(connection.recv(FORK_REPLY.size))
    assert pid > 0, os.strerror(-pid)
    return Forked(pid)


def parent_of(pid: int) -> int:
    """Return the parent of a process (proc_pid_stat(5), field 4)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers_of(pid: int) -> list[int]:
    """Return the workers of an agent: its children but their template."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if name_of(int(child)) != "edge-template"]


def name_of(pid: int) -> str:
    """Return the name that `ps -o comm` shows; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
