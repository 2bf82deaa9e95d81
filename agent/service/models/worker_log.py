"""What a worker writes to its standard output and error, as lines of the agent's log.

A worker's native code is not trusted: with the agent's own standard error it could imitate the agent's lines,
use up the rate at which the journal takes them, fill a disk, or read from a terminal.

Promises: a line is named after its model, bounded, and printable; a worker that writes faster has to wait, so
it costs the agent little time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Final

_log = logging.getLogger(__name__)

# A traceback has fewer lines. More have to wait: together 100 lines in ten seconds.
_LINES: Final = 100
_INTERVAL_S: Final = 10.0
# The longest line of a traceback; a longer one is cut.
_LINE_BYTES: Final = 500
_CHUNK_BYTES: Final = 4096
# How much is read when the process has ended.
_LAST_BYTES: Final = 16 << 10


class WorkerLog:
    """The lines that one process writes, as `source`'s."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._rest = b""
        self._lines = 0
        self._interval_began_s = 0.0
        self._pause: asyncio.TimerHandle | None = None
        self._open = True
        self._theirs_open = True

    def watch(self) -> None:
        """Read from now on; the process has inherited `theirs`, which is closed here."""
        self._close_theirs()
        self._listen()

    def close(self) -> None:
        """Log what is left, and read no more."""
        self._close_theirs()
        if not self._open:
            return
        asyncio.get_running_loop().remove_reader(self._ours)
        if self._pause is not None:
            self._pause.cancel()
        with contextlib.suppress(OSError):
            self._take(os.read(self._ours, _LAST_BYTES))
        if self._rest:
            self._write(self._rest)
        self._open = False
        os.close(self._ours)

    def _close_theirs(self) -> None:
        if self._theirs_open:
            self._theirs_open = False
            os.close(self.theirs)

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def _read(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._interval_began_s >= _INTERVAL_S:
            self._lines, self._interval_began_s = 0, loop.time()
        if self._lines >= _LINES:
            loop.remove_reader(self._ours)
            self._pause = loop.call_at(self._interval_began_s + _INTERVAL_S, self._listen)
            return
        try:
            chunk = os.read(self._ours, _CHUNK_BYTES)
        except OSError:
            chunk = b""
        if chunk:
            self._take(chunk)
        else:
            # The process is gone, or has closed it.
            loop.remove_reader(self._ours)

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._write(line)
        while len(self._rest) >= _LINE_BYTES:
            self._write(self._rest[:_LINE_BYTES])
            self._rest = self._rest[_LINE_BYTES:]

    def _write(self, line: bytes) -> None:
        text = line[:_LINE_BYTES].decode("utf-8", "backslashreplace")
        shown = "".join(character if character.isprintable() else "?" for character in text)
        if self._lines < _LINES:
            _log.warning("%s: %s", self._source, shown)
        self._lines += 1
