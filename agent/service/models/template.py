"""The process that all workers are forks of, on the event loop; `agent.worker.__main__` is what it runs.

Promises: it is started with the first worker, from this installation, with a small environment and none of
the agent's descriptors; if it ends, workers live on, and the next one waits for another template. It ends a
while after its last fork if it has fewer than two workers. Workers are children of this process, which must
reap them.
Leaves to others: what a worker is given, and its end (`worker_process`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import agent
from agent.service.models.worker_log import WorkerLog
from agent.worker.frames import FORK_REPLY

_log = logging.getLogger(__name__)

# The variables that workers inherit: how Python finds its modules, how text is shown, what steers kernels.
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
_ENVIRONMENT_PREFIXES: Final = ("EDGE_",)
# Python and numpy from a slow SD card.
_START_LIMIT_S: Final = 60.0
# Two forks take milliseconds; on a device without processor time to spare, a second.
_FORK_LIMIT_S: Final = 5.0
# Templates for one worker: one may be killed at any time, but hardly each.
_ATTEMPTS: Final = 3
# When it is compared with what it saves: two models of a deployment start within this time.
_REST_S: Final = 600.0
# With one worker, a template takes memory and shares it with that worker only.
_LEAST_WORKERS: Final = 2
_PR_SET_CHILD_SUBREAPER: Final = 36


class Template:
    """The template of all workers of an agent."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        # Only once it is ready.
        self._socket: socket.socket | None = None
        self._lines: WorkerLog | None = None
        # A start, or a fork, at a time.
        self._using = asyncio.Lock()
        self._reply: asyncio.Future[bytes] | None = None
        self._forked: list[int] = []
        self._rest: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Its process id, while it runs."""
        return None if self._process is None else self._process.pid

    async def fork(self, descriptors: Sequence[int]) -> int:
        """Fork a worker, and return its process id; OSError if there is none left, or no template starts.

        Its channel, what becomes its standard error, and its end of the gate stay open here.
        """
        for _ in range(_ATTEMPTS):
            async with self._using:
                if self._socket is None:
                    await self._start()
                pid = await self._ask(descriptors)
            if pid is not None:
                return pid
        raise ChildProcessError(errno.ECHILD, "the template of workers ends whenever it is started")

    def close(self) -> None:
        """End it; its workers live on."""
        if self._process is None:
            return
        self._process.kill()
        if self._socket is not None:  # otherwise `_start` sees its end
            self._forget()

    async def _start(self) -> None:
        """Start a template; without a socket afterwards it has ended before it was ready."""
        # The kernel gives a worker to this process when the process that has forked it ends.
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            # User-mode emulation (qemu-user 7.2); each kernel that Landlock or the gate needs can do it.
            _log.warning(
                "the kernel does not make the agent the parent of its workers: how one ends is unknown"
            )
        self._lines = WorkerLog("the template of workers")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ready = b""
        try:
            with theirs:
                # On the event loop: it takes half a millisecond (vfork). If a thread called it, the end of
                # that thread would end the template (PR_SET_PDEATHSIG).
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*template_command(), str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=self._lines.theirs,
                    stderr=self._lines.theirs,
                    env=_environment(os.environ),
                    cwd="/",
                    start_new_session=True,
                )
            self._lines.watch()
            ours.setblocking(False)
            async with asyncio.timeout(_START_LIMIT_S):
                ready = await asyncio.get_running_loop().sock_recv(ours, FORK_REPLY.size)
        finally:
            self._socket = ours
            if not ready:
                self._forget()
        if self._socket is not None:
            asyncio.get_running_loop().add_reader(ours, self._readable)

    async def _ask(self, descriptors: Sequence[int]) -> int | None:
        """Return the process id of a new worker; None if the template is gone."""
        if self._socket is None:
            return None
        self._reply = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._socket, [b"f"], descriptors)
            async with asyncio.timeout(_FORK_LIMIT_S):
                reply = await self._reply
        except (BrokenPipeError, ConnectionResetError):
            reply = b""
        except BaseException:
            # It is stuck, or not waited for, and could still fork: this channel must not get a second worker.
            self._forget()
            raise
        finally:
            self._reply = None
        if not reply:
            if self._socket is not None:
                self._lost()
            return None
        (pid,) = FORK_REPLY.unpack(reply)
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        self._forked.append(pid)
        self._rest_later()
        return int(pid)

    def _readable(self) -> None:
        """Take its reply; without a question it has ended."""
        if self._reply is None or self._reply.done():
            self._lost()
            return
        assert self._socket is not None
        reply = b""
        with contextlib.suppress(OSError):
            reply = self._socket.recv(FORK_REPLY.size)
        self._reply.set_result(reply)

    def _rest_later(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._rest = asyncio.get_running_loop().call_later(_REST_S, self._check)

    def _check(self) -> None:
        """End it if it has too few workers to be worth its memory; the next worker starts another."""
        self._forked = [pid for pid in self._forked if _is_child(pid)]
        if len(self._forked) < _LEAST_WORKERS:
            self.close()
        else:
            self._rest_later()

    def _lost(self) -> None:
        """Take note that it has ended by itself."""
        status = self._forget()
        _log.warning("the template of workers ended (status %s): the next worker starts another", status)

    def _forget(self) -> int | None:
        """End it if it still runs, and let go of what belongs to it; return its status."""
        status = None
        self._forked = []
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(b"")
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            status, self._process = self._process.wait(), None
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        return status


def _is_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def template_command() -> tuple[str, ...]:
    """Return the command, without its socket; -P keeps the current directory off the module path."""
    return (sys.executable, "-P", "-m", "agent.worker")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in ours.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    # The worker must come from this installation, however Python found it.
    root = str(Path(agent.__file__).parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(part for part in (root, ours.get("PYTHONPATH", "")) if part)
    return kept
