"""One worker process and the channel to it, on the event loop.

Promises: starts it with nothing but its end of a socket pair, standard error and a small environment;
hands it the sealed files; reports its frames and its end, each end once; leaves no process behind that it
was told to end. Leaves to others: what is sent when, and what an end means (`workers`).
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
from typing import Final

import agent
from agent.errors import ChannelError
from agent.worker.channel import Buffer, Decoder, Frame, Header, Load, Stop, encode

# What a worker inherits: how Python finds its modules, how text is shown, and what steers kernels.
_ENVIRONMENT: Final = ("PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
_ENVIRONMENT_PREFIXES: Final = ("EDGE_",)
_REAP_INTERVAL_S: Final = 0.01
# The first write has to fit into a new socket's buffer, and be small enough to go with the descriptors.
_FIRST_WRITE_BYTES: Final = 16 << 10
# Up to here a copy costs less than another system call.
_JOINED_BYTES: Final = 16 << 10


class WorkerProcess:
    """A started worker.

    Parameters
    ----------
    name
        For the log: the model's.
    command
        The program and its arguments; the number of the channel's descriptor is appended.
    on_frame
        Called with each frame that comes.
    on_end
        Called once, with a description of how it ended, after the last frame.
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
        self._complaint = ""
        self._ended = asyncio.Event()
        self._reaping: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return None if self._process is None or self._ended.is_set() else self._process.pid

    async def start(self, load: Load, manifest: bytes, descriptors: Sequence[int]) -> None:
        """Start it and send it what to load; `ready` or `failed` come as frames.

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
                    # Ctrl-C is for us; we end our workers when what they accepted is answered.
                    start_new_session=True,
                )
            ours.setblocking(False)
            head, payload = encode(load, manifest)
            data = head + bytes(payload)
            sent = socket.send_fds(ours, [data[:_FIRST_WRITE_BYTES]], list(descriptors))
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(
                lambda: _Protocol(self._frame, self._lost), sock=ours
            )
        except OSError:
            ours.close()
            self.kill()
            raise
        self._transport.write(data[sent:])

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a frame; nothing happens when the worker is gone, whose end is reported elsewhere."""
        if self._transport is not None and not self._transport.is_closing():
            head, body = encode(header, payload)
            if len(body) > _JOINED_BYTES:
                self._transport.write(head)
                self._transport.write(body)
            else:
                # One system call, and one time that the worker is woken.
                self._transport.write(head + body)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    async def stop(self, limit_s: float) -> None:
        """Let it answer what it has, and end it; kill it after `limit_s`."""
        self.send(Stop())
        try:
            async with asyncio.timeout(limit_s):
                await self._ended.wait()
        except TimeoutError:
            self.kill()
            await self._ended.wait()

    def rss_bytes(self) -> int:
        """Return its resident memory, 0 when it is gone."""
        pid = self.pid
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            return 0
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if pid is not None else 0

    def _frame(self, frame: Frame) -> None:
        self._on_frame(frame)

    def _lost(self, complaint: str) -> None:
        self._complaint = complaint
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        # A worker that has closed its channel is of no use: it is about to end, or it is made to.
        process = self._process
        assert process is not None
        for _ in range(100):
            if process.poll() is not None:
                break
            await asyncio.sleep(_REAP_INTERVAL_S)
        self.kill()
        while process.poll() is None:
            await asyncio.sleep(_REAP_INTERVAL_S)
        self._ended.set()
        self._on_end(self._complaint or _ending(process.returncode))


class _Protocol(asyncio.BufferedProtocol):
    """Feeds the frame decoder without a copy in between."""

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
            # What runs there is native code of a model: whatever it writes is believed only as far as it
            # parses.
            self._complaint = f"sent what is no frame: {error}"
            if self._transport is not None:
                self._transport.close()
            return
        for frame in frames:
            self._on_frame(frame)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._on_lost(self._complaint)


def worker_command() -> tuple[str, ...]:
    """Return the command of our own worker: no current directory on its module path."""
    return (sys.executable, "-P", "-m", "agent.worker")


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in ours.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    # The worker must be of this very installation, however that was found.
    root = str(Path(agent.__file__).parent.parent)
    kept["PYTHONPATH"] = os.pathsep.join(part for part in (root, ours.get("PYTHONPATH", "")) if part)
    # numpy's own thread pool would only cost memory: kernels have theirs.
    kept["OPENBLAS_NUM_THREADS"] = kept["OMP_NUM_THREADS"] = "1"
    return kept


def _ending(status: int) -> str:
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"ended with status {status}"
