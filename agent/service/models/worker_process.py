"""One worker process and the channel to it, on the event loop.

Promises: the process gets only its ends of two socket pairs, a pipe for its log, and the sealed files; its
frames are reported in order, then its end, once; a process that was asked to end does end, and is reaped.
Its processors, processor time and threads are set here, because its sandbox keeps it from changing them.
Leaves to others: how there comes to be a process (`template`), what is sent when, and what an end means
(`supervisor`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import signal
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from agent.bundle.processors import cores_of
from agent.errors import ChannelError
from agent.service.models.processor_meter import ProcessorMeter
from agent.service.models.thread_gate import ThreadGate, thread_limit
from agent.service.models.worker_log import WorkerLog
from agent.worker.channel import Decoder
from agent.worker.frames import Answer, Buffer, Frame, Header, Load, Ready, Request, Share, Stop, encode

_log = logging.getLogger(__name__)

# A worker that has closed its channel is of no use: it gets this long to end before it is killed.
_END_GRACE_S: Final = 1.0
# The first write must fit into a new socket's buffer, and be small enough to go with the descriptors.
_FIRST_WRITE_BYTES: Final = 16 << 10
# How often a worker is allowed more processor time, and its use is compared with its requests.
CHECK_INTERVAL_S: Final = 10.0
# Processor time that no request explains: as much as the longest request may take by default.
_UNEXPLAINED_LIMIT_S: Final = 30.0
# How soon the end of a process is seen without a descriptor for it.
_POLL_INTERVAL_S: Final = 0.1
# What the launcher (builder/codegen/link/launcher.c) calls the threads that help with kernels.
_KERNEL_THREAD: Final = b"edge-kernel"
# Answers after a change of threads until the new ones exist: to requests that were sent before, and one more.
_ANSWERS_TO_PLACE: Final = 3
# Threads that start while others are moved inherit the old processors, so the list is read again.
_MOVE_ROUNDS: Final = 4
_TICKS: Final = os.sysconf("SC_CLK_TCK")
# Up to this size a copy costs less than another system call.
_JOINED_BYTES: Final = 16 << 10
# What a worker's socket does not take at once is copied by asyncio (of Python 3.11), so it gets no more.
_WRITE_BYTES: Final = 256 << 10

# Makes a child process with these descriptors: its channel, its standard error, its end of the gate. Returns
# its process id, or raises OSError.
Launch = Callable[[Sequence[int]], Awaitable[int]]


class WorkerProcess:
    """A worker process.

    Parameters
    ----------
    name
        The model's name, for the log.
    launch
        Makes the process: `Template.fork`, or a test's.
    on_frame
        Called with each frame that arrives.
    on_end
        Called once, after the last frame, with a description of how the process ended.
    """

    def __init__(
        self,
        name: str,
        *,
        launch: Launch,
        on_frame: Callable[[Frame], None],
        on_end: Callable[[str], None],
    ) -> None:
        self.name = name
        self._launch = launch
        self._on_frame = on_frame
        self._on_end = on_end
        self._pid: int | None = None
        # How it ended, once it is reaped.
        self._how: str | None = None
        self._gate: ThreadGate | None = None
        self._lines: WorkerLog | None = None
        self._transport: asyncio.Transport | None = None
        # What it has not been given yet, and whether its socket takes no more now.
        self._unwritten: deque[memoryview] = deque()
        self._is_full = False
        self._ended = asyncio.Event()
        self._reaping: asyncio.Task[None] | None = None
        self._cores: tuple[tuple[int, ...], ...] = ()
        self._to_place = 0
        self._allowance_s = 0
        self._processors = 0
        self._meter: ProcessorMeter | None = None
        self._check: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self._answered = 0
        self._busy_s = 0.0
        self._busy_since_s = 0.0

    @property
    def pid(self) -> int | None:
        """The process id, while it runs."""
        return None if self._ended.is_set() else self._pid

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
        self._allowance_s = load.cpu_s
        self._processors = len(load.cpus) or os.cpu_count() or 1
        self._cores = cores_of(load.cpus)
        self._to_place = 1
        undo = contextlib.ExitStack()
        try:
            self._gate = gate = ThreadGate(self.name, thread_limit(load.threads))
            undo.callback(gate.close)
            self._lines = lines = WorkerLog(f"{self.name}: its worker")
            undo.callback(lines.close)
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                passed = (theirs.fileno(), lines.theirs, gate.theirs.fileno())
                self._pid = await self._launch(passed)
            gate.watch(self._pid)
            lines.watch()
            ours.setblocking(False)
            head, payload = encode(load, manifest)
            data = head + bytes(payload)
            sent = socket.send_fds(ours, [data[:_FIRST_WRITE_BYTES]], list(descriptors))
            loop = asyncio.get_running_loop()
            self._transport, _ = await loop.create_connection(
                lambda: _Protocol(self._take, self._lost, self._go_on), sock=ours
            )
        except BaseException:
            undo.close()
            if self._pid is not None:
                self._lost("")
                self.kill()
            raise
        self._transport.write(data[sent:])
        self._check_later()

    def send(self, header: Header, payload: Buffer = b"") -> None:
        """Send a frame; one for a worker that is gone is dropped, since its end is reported anyway."""
        if isinstance(header, Share):
            self._move(header.cpus)
        if self._transport is not None and not self._transport.is_closing():
            if isinstance(header, Request):
                if not self._unanswered:
                    self._busy_since_s = _now_s()
                self._unanswered += 1
            head, body = encode(header, payload)
            if len(body) > _JOINED_BYTES or self._unwritten:
                self._unwritten += memoryview(head), memoryview(body)
                self._go_on(is_full=self._is_full)
            else:
                # One system call, and the worker wakes up once.
                self._transport.write(head + body)

    def _go_on(self, *, is_full: bool) -> None:
        """Write what waits, in parts, as long as the socket takes them."""
        self._is_full = is_full
        while self._unwritten and not self._is_full and self._transport is not None:
            part = self._unwritten.popleft()
            if len(part) > _WRITE_BYTES:
                self._unwritten.appendleft(part[_WRITE_BYTES:])
            self._transport.write(part[:_WRITE_BYTES])  # which may call `pause_writing`

    def kill(self) -> None:
        """Kill it."""
        if self._pid is not None and self._how is None:
            # It may be gone if another process is its parent.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

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

    def _take(self, frame: Frame) -> None:
        """Measure how long it computes, and pass the frame on."""
        if isinstance(frame.header, Answer):
            self._answered += 1
            self._unanswered = max(0, self._unanswered - 1)
            if not self._unanswered:
                self._busy_s += _now_s() - self._busy_since_s
            self._place()
        elif isinstance(frame.header, Ready):
            self._meter = ProcessorMeter(_now_s(), self._processor_s())
            self._busy_s = 0.0
            self._place()
            if self._gate is not None:
                frame = Frame(self._gate.confirm(frame.header), frame.payload)
        self._on_frame(frame)

    def _move(self, cpus: Sequence[int]) -> None:
        """Move all of its threads to other processors."""
        pid = self.pid
        if pid is None:
            return
        self._processors = max(self._processors, len(cpus))
        moved: set[str] = set()
        try:
            for _ in range(_MOVE_ROUNDS):
                threads = set(os.listdir(f"/proc/{pid}/task")) - moved  # noqa: PTH208 - names, not paths
                for thread in threads:
                    with contextlib.suppress(ProcessLookupError):
                        os.sched_setaffinity(int(thread), cpus)
                moved |= threads
                if not threads:
                    break
        except OSError as error:
            # A processor can be switched off at any time; the model must still run.
            _log.warning("%s: processors %s: %s", self.name, list(cpus), error.strerror)
        self._cores, self._to_place = cores_of(cpus), _ANSWERS_TO_PLACE + 1
        self._place()

    def _place(self) -> None:
        """Give each thread that helps with kernels a core of its own, if there may be new ones.

        Linux wakes a thread beside the one that wakes it, and leaves both there for a while although another
        core idles. The launcher would part them, but the sandbox keeps it from that.
        """
        if not self._to_place or len(self._cores) < 2:
            return
        self._to_place -= 1
        threads = Path(f"/proc/{self.pid}/task")
        # The thread that calls kernels may run anywhere. One that ends meanwhile, or a processor that is
        # switched off, costs only time.
        with contextlib.suppress(OSError):
            named = [
                int(thread)
                for thread in os.listdir(threads)  # noqa: PTH208 - names, not paths
                # Bytes: a model may give its threads any name.
                if (threads / thread / "comm").read_bytes().strip() == _KERNEL_THREAD
            ]
            for index, thread in enumerate(sorted(named), start=1):
                os.sched_setaffinity(thread, self._cores[index % len(self._cores)])

    def _check_later(self) -> None:
        self._check = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._check_processor)

    def _check_processor(self) -> None:
        """Allow it more processor time, unless it uses time that no request explains."""
        pid = self.pid
        if pid is None:
            return
        used_s = self._processor_s()
        if self._allowance_s:
            with contextlib.suppress(OSError, ValueError):
                hard = resource.prlimit(pid, resource.RLIMIT_CPU)[1]
                resource.prlimit(pid, resource.RLIMIT_CPU, (math.ceil(used_s) + self._allowance_s, hard))
        if self._meter is not None and self._unexplained_s(self._meter, used_s) > _UNEXPLAINED_LIMIT_S:
            _log.error(
                "%s: its worker computed for %g s without a request and is ended",
                self.name,
                _UNEXPLAINED_LIMIT_S,
            )
            self.kill()
            return
        self._check_later()

    def _unexplained_s(self, meter: ProcessorMeter, used_s: float) -> float:
        now_s = _now_s()
        if self._unanswered:
            self._busy_s += now_s - self._busy_since_s
            self._busy_since_s = now_s
        unexplained_s = meter.feed(
            now_s, used_s, busy_s=self._busy_s, requests=self._answered, processors=self._processors
        )
        self._busy_s, self._answered = 0.0, 0
        return unexplained_s

    def _processor_s(self) -> float:
        """Return its processor time (proc_pid_stat(5), utime and stime); 0 when it is gone."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def _lost(self, complaint: str) -> None:
        """Take note that the channel is closed; `complaint` says what was wrong, if anything was."""
        self._unwritten.clear()
        if self._reaping is None:
            self._reaping = asyncio.get_running_loop().create_task(self._reap(complaint))

    async def _reap(self, complaint: str) -> None:
        exit_ = asyncio.get_running_loop().create_task(self._wait_for_exit())
        await asyncio.wait({exit_}, timeout=_END_GRACE_S)
        self.kill()
        await exit_
        if self._check is not None:
            self._check.cancel()
        if self._gate is not None:
            self._gate.close()
        if self._lines is not None:
            self._lines.close()
        self._ended.set()
        assert self._how is not None
        self._on_end(complaint or self._how)

    async def _wait_for_exit(self) -> None:
        """Return when the process has ended and is reaped."""
        assert self._pid is not None
        try:
            descriptor = os.pidfd_open(self._pid)
        except OSError:  # a kernel before 5.3, a system call filter, or no descriptor left
            while not self._reap_process(self._pid, os.WNOHANG):
                await asyncio.sleep(_POLL_INTERVAL_S)
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._reap_process(self._pid, 0)

    def _reap_process(self, pid: int, options: int) -> bool:
        """Reap it if it has ended: from then on its number may be another process's."""
        try:
            ended, status = os.waitpid(pid, options)
        except ChildProcessError:
            # Another process is its parent (see `Template`): it has closed its channel, so it must end.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._how = "ended"
            return True
        if ended:
            self._how = _ending(os.waitstatus_to_exitcode(status))
        return bool(ended)


class _Protocol(asyncio.BufferedProtocol):
    """Feeds the frame decoder; bytes from the socket go straight into its buffers."""

    def __init__(
        self,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        on_full: Callable[..., None],
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._on_full = on_full
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

    def pause_writing(self) -> None:
        self._on_full(is_full=True)

    def resume_writing(self) -> None:
        self._on_full(is_full=False)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        self._on_lost(self._complaint)


class Spawn(Protocol):
    """How a supervisor makes its processes: `WorkerProcess` with a `Launch`."""

    def __call__(
        self, name: str, *, on_frame: Callable[[Frame], None], on_end: Callable[[str], None]
    ) -> WorkerProcess:
        """Return a process that has not been started."""


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _ending(status: int) -> str:
    if status < 0:
        try:
            return f"killed by {signal.Signals(-status).name}"
        except ValueError:
            return f"killed by signal {-status}"
    return f"ended with status {status}"
