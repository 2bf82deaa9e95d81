"""The number of this start of the agent, `session_seq`: it is on disk, and grows with each start.

Promises: a disk that cannot be written, or does not respond, ends in a number from the clock, never in an
error; it is stored when the disk can be written again.
Leaves to others: publishing it (`presence`), watching the disk (`agent.deploy.store.storage`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import Final

from agent.deploy.store.state_file import set_aside
from agent.disk_thread import in_disk_thread
from agent.durable import write_durably
from agent.errors import StoreError
from agent.reading import open_at_once
from agent.wire.document import MAX_SAFE_INTEGER

_log = logging.getLogger(__name__)

_FILE: Final = "session_seq"
_MAX_FILE_BYTES: Final = 32


class SessionSeq:
    """The number of this start, stored in `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._unstored: int | None = None
        self._storing: set[asyncio.Task[None]] = set()

    @property
    def stored(self) -> bool:
        """Whether the disk has the number that `take` returned."""
        return self._unstored is None

    async def take(self, limit_s: float) -> int:
        """Return the number of this start, from the clock if the disk does not respond within `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                seq, stored = await in_disk_thread(_next_seq, self._state_dir)
        except (TimeoutError, StoreError) as error:
            _log.error("the number of this start is not stored: %s", error or "the disk does not respond")
            seq, stored = _seq_from_clock(), False
        self._unstored = None if stored else seq
        return seq

    def store_later(self) -> None:
        """Store the number if the disk does not have it: the disk can be written again."""
        if self._unstored is not None:
            storing = asyncio.get_running_loop().create_task(self._store(self._unstored))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)

    async def _store(self, seq: int) -> None:
        try:
            await in_disk_thread(_store_seq, self._state_dir, seq)
        except StoreError as error:
            _log.warning("the number of this start is not stored: %s", error)
        else:
            self._unstored = None


def _next_seq(state_dir: Path) -> tuple[int, bool]:
    """Return the number of this start, and whether it is stored durably.

    If it cannot be stored, the time makes it grow. This blocks: call it in a thread.
    """
    path = state_dir / _FILE
    try:
        with os.fdopen(open_at_once(path), "rb") as file:
            raw = file.read(_MAX_FILE_BYTES) or b""
    except FileNotFoundError:
        raw = b"0"
    except IsADirectoryError:
        raw = b""
        set_aside(path)
    except OSError as error:
        raw = b""
        _log.warning("cannot read %s: %s", path, error.strerror)
    before = int(raw) if raw.isdigit() else MAX_SAFE_INTEGER
    if before >= MAX_SAFE_INTEGER:
        _log.warning("expected a number of starts in %s, got something else: the time replaces it", path)
        before = _seq_from_clock() - 1
    try:
        _store_seq(state_dir, before + 1)
    except StoreError as error:
        _log.error("%s: session_seq comes from the clock", error)
        return max(before + 1, _seq_from_clock()), False
    return before + 1, True


def _store_seq(state_dir: Path, seq: int) -> None:
    """Store the number of this start durably."""
    write_durably(state_dir / _FILE, str(seq).encode())


def _seq_from_clock() -> int:
    """Return a number that is higher than those of earlier starts, if the clock is right.

    Seconds since 1970 are more than any count of starts.
    """
    return int(time.time())
