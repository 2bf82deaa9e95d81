"""One worker process and the channel to it, on the event loop.

Promises: the process inherits only its end of a socket pair, standard output and error, and a small
environment; it gets the sealed files; its frames are reported in order, then its end, once; a process that
was asked to end does end, and is reaped.
Leaves to others: what is sent when, and what an end means (`supervisor`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import agent
from agent.errors import ChannelError
from agent.worker.channel import Decoder
from agent.worker.frames import Buffer, Frame, Header, Load, Stop, encode

# The variables that a worker inherits: how Python finds its modules, how text is shown, what steers kernels.
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
_ENVIRONMENT_PREFIXES: Final = ("EDGE_",)
# A worker that has closed its channel is of no use: it gets this long to end before it is killed.
_END_GRACE_S: Final = 1.0
# The first write must fit into a new socket's buffer, and be small enough to go with the descriptors.
_FIRST_WRITE_BYTES: Final = 16 << 10
# Up to this size a copy costs less than another system call.
_JOINED_BYTES: Final = 16 << 10


class WorkerProcess:
    """A worker process.

    Parameters
    ----------
    name
        The model's name, for the log.
    command
        The program and its arguments, to which the number of the channel's descriptor is appended; None for
        our own worker.
    on_frame
        Called with each frame that arrives.
    on_end
        Called once, after the last frame, with a description of how the process ended.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.name = name
        self._command = worker_command() if command is None else tuple(command)
        self._on_frame = on_frame
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ended = asyncio.Event()
        self._reaping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        return None if self._process is None or self._ended.is_set() else self._process.pid

    async def start(self, load: Load, manifest: bytes, descriptors: Sequence[int]) -> None:
        """Start it and send the load frame, which it answers with the frame `ready` or `failed`.

        Parameters
        ----------
        load
            The first frame.
        manifest
            The frame's payload.
        descriptors
            The bundle's sealed files, in the order of `load.files`; they stay open here.

        Raises
        ------
        OSError
            If no process can be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    [*self._command, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=_environment(os.environ),
                    cwd="/",
                    # Ctrl-C is for the agent, which ends its workers when they have answered their requests.
                    start_new_session=True,
                )
            ours.setblocking(False)
            head, payload = encode(load, manifest)
            data = head + bytes(payload)
            sent = socket.send_fds(ours, [data[:_FIRST_WRITE_BYTES]], list(descriptors))
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(
                lambda: _Protocol(self._on_frame, self._lost), sock=ours
            )
        except OSError:
            ours.close()
            if self._process is not None:
                self._lost("")
                self.kill()
            raise
        self._transport.write(data[sent:])

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a frame; one for a worker that is gone is dropped, since its end is reported anyway."""
        if self._transport is not None and not self._transport.is_closing():
            head, body = encode(header, payload)
            if len(body) > _JOINED_BYTES:
                self._transport.write(head)
                self._transport.write(body)
            else:
                # One system call, and the worker wakes up once.
                self._transport.write(head + body)

    def kill(self) -> None:
        """Kill it."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    async def stop(self, limit_s: float) -> None:
        """Ask it to answer what it has and to end; kill it after `limit_s`. Returns when it is reaped."""
        self.send(Stop())
        try:
            async with asyncio.timeout(limit_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def rss_bytes(self) -> int:
        """Return its resident memory; 0 when it is gone."""
        pid = self.pid
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if pid is not None else 0

    def _lost(self, complaint: str) -> None:
        """Take note that the channel is closed; `complaint` says what was wrong, if anything was."""
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap(complaint))

    async def _reap(self, complaint: str) -> None:
        process = self._process
        assert process is not None
        exit_ = asyncio.get_running_loop().create_task(_wait_for_exit(process))
        await asyncio.wait({exit_}, timeout=_END_GRACE_S)
        self.kill()
        await exit_
        self._ended.set()
        self._on_end(complaint or _ending(process.returncode))


class _Protocol(asyncio.BufferedProtocol):
    """Feeds the frame decoder; bytes from the socket go straight into its buffers."""

    def __init__(self, on_frame: Callable[[Frame], None], on_lost: Callable[[str], None]) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._decoder = Decoder()
        self._transport: asyncio.BaseTransport | None = None
        self._complaint = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        try:
            frames = self._decoder.buffer_updated(nbytes)
        except ChannelError as error:
            # The worker runs a model's native code: what it writes is not trusted.
            self._complaint = f"sent an invalid frame: {error}"
            if self._transport is not None:
                self._transport.close()
            return
        for frame in frames:
            self._on_frame(frame)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._on_lost(self._complaint)


class Spawn(Protocol):
    """How a supervisor makes its processes: `WorkerProcess`, or one with another command."""

    def __call__(
        self, name: str, *, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> WorkerProcess:
        """Return a process that has not been started."""


def worker_command() -> tuple[str, ...]:
    """Return the command of our own worker; -P keeps the current directory off its module path."""
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
    # numpy's thread pool would only cost memory: kernels have their own.
    kept["OPENBLAS_NUM_THREADS"] = kept["OMP_NUM_THREADS"] = "1"
    return kept


async def _wait_for_exit(process: subprocess.Popen[bytes]) -> None:
    """Return when the process has ended and is reaped."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # a kernel before 5.3, or a system call filter: a thread waits
        await asyncio.to_thread(process.wait)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


def _ending(status: int) -> str:
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"ended with status {status}"
