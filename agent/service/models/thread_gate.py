"""Decides about each thread that a worker wants to start, so that no worker uses up the device's threads.

A filter of system calls cannot count, RLIMIT_NPROC counts all processes of a user, and a control group needs
rights that the agent does not have. So the worker's filter asks: the kernel stops a thread that calls clone,
and notifies the agent, which looks how many threads the process has (seccomp_unotify(2); Linux 5.7). The
worker hands over the descriptor of these notifications, and says which parts of its sandbox are in force,
before it maps the model's library: code of the model cannot change either.

Promises: a worker has at most `limit` threads, or nearly twice as many if all of them start others in the
same moment; nothing here blocks; decisions take little of the agent's time, however many are asked for.
Reference: linux/seccomp.h.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import select
import socket
import struct
from dataclasses import replace
from typing import Final

from agent.worker.frames import SANDBOX_REPORT, Ready

_log = logging.getLogger(__name__)

# _IOWR('!', 0, struct seccomp_notif) and _IOWR('!', 1, struct seccomp_notif_resp).
_RECEIVE: Final = 0xC0502100
_SEND: Final = 0xC0182101
_NOTIFICATION_BYTES: Final = 80
_ID: Final = struct.Struct("=Q")
# The id, a result, an errno, flags.
_ANSWER: Final = struct.Struct("=QqiI")
_CONTINUE: Final = 1
# A model that starts and ends threads in a loop must not keep the agent busy: further decisions wait. The
# largest worker starts all of its threads within this number.
_DECISIONS: Final = 256
_INTERVAL_S: Final = 1.0
# The main thread, one that watches the channel, and some that libraries start.
_SPARE: Final = 6


def thread_limit(threads: int) -> int:
    """Return the limit of a worker whose kernels use `threads` threads; 0 means one for each processor.

    Twice, because a changed number of threads replaces all of them.
    """
    return 2 * max(threads, os.cpu_count() or 1) + _SPARE


class ThreadGate:
    """The gate of one worker, whose process may have `limit` threads."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._pid = 0
        self._refused = 0
        self._decided = 0
        self._interval_began_s = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._listener: int | None = None
        self._report = (0, False)
        self._ours, self.theirs = socket.socketpair()

    def watch(self, pid: int) -> None:
        """Serve the process from now on, whose end `theirs` is closed here."""
        self._pid = pid
        self.theirs.close()
        self._ours.setblocking(False)
        asyncio.get_running_loop().add_reader(self._ours, self._take_listener)

    def confirm(self, ready: Ready) -> Ready:
        """Return what a worker says when it is ready, with the sandbox that it reported before."""
        if self._ours.fileno() >= 0:
            self._take_listener()
        landlock, seccomp = self._report
        return replace(ready, landlock=landlock, seccomp=seccomp, threads_bounded=self._listener is not None)

    def close(self) -> None:
        """Serve no more; a thread that waits is refused by the kernel."""
        loop = asyncio.get_running_loop()
        if self._ours.fileno() >= 0:
            loop.remove_reader(self._ours)
        self._ours.close()
        self.theirs.close()
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            loop.remove_reader(self._listener)
            os.close(self._listener)
            self._listener = None

    def _take_listener(self) -> None:
        """Take the report, and the descriptor of the notifications if there is one."""
        data = b""
        received: list[int] = []
        with contextlib.suppress(OSError):
            data, received, _, _ = socket.recv_fds(self._ours, SANDBOX_REPORT.size, 1)
        if len(data) == SANDBOX_REPORT.size:
            self._report = SANDBOX_REPORT.unpack(data)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ours)
        self._ours.close()
        if received:
            self._listener = received[0]
            self._listen()

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._decide)

    def _decide(self) -> None:
        """Answer one notification."""
        listener = self._listener
        if listener is None:
            return
        loop = asyncio.get_running_loop()
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        if not any(events & select.POLLIN for _, events in poll.poll(0)):
            # The process is gone. To read now could block.
            loop.remove_reader(listener)
            return
        if loop.time() - self._interval_began_s >= _INTERVAL_S:
            self._decided, self._interval_began_s = 0, loop.time()
        self._decided += 1
        if self._decided > _DECISIONS:
            # The thread that asks is stopped by the kernel until then.
            loop.remove_reader(listener)
            self._pause = loop.call_at(self._interval_began_s + _INTERVAL_S, self._listen)
            return
        notification = bytearray(_NOTIFICATION_BYTES)
        # ENOENT: the thread was killed, or interrupted by a signal, and asks again.
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _RECEIVE, notification)
            (number,) = _ID.unpack_from(notification)
            allowed = self._threads() < self._limit
            if not allowed:
                self._refuse()
            answer = _ANSWER.pack(number, 0, 0 if allowed else -errno.EAGAIN, _CONTINUE if allowed else 0)
            fcntl.ioctl(listener, _SEND, answer)

    def _threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self._pid}/task"))  # noqa: PTH208 - only the number matters
        except OSError:
            return self._limit

    def _refuse(self) -> None:
        self._refused += 1
        if self._refused == 1:
            _log.warning("%s: its worker may start no more than %d threads", self._name, self._limit)
