"""Whether the state directory can be written, and if not, why: the agent then serves without writing.

::

    writable         everything is stored
    full             no space, no inodes, or over a quota
    read-only        the file system is mounted read-only, as Linux does when a card is dying
    failing          reads or writes end with an error
    unavailable      the folder is missing, or belongs to another user
    not responding   a read or write does not return

Promises: the event loop never waits for the disk here. A healthy disk is written to rarely, because an SD
card wears out; one that failed is tested often, so that the agent soon notices its return. At most
one call waits for a disk that does not respond.
Leaves to others: what to do without a disk (`agent.service`, `agent.deploy.deployment`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from agent.disk_thread import in_disk_thread
from agent.durable import try_out
from agent.errors import StoreError

# How often the file system is examined without a write; a failed one is also tested with a write.
LOOK_INTERVAL_S: Final = 10.0
# A healthy disk is written to this often, to notice one that fails without saying so: some 16 kB each time.
TRIAL_INTERVAL_S: Final = 600.0
# An SD card that collects its garbage takes seconds; after this long it counts as not responding.
RESPONSE_LIMIT_S: Final = 20.0
# Below this the largest state file may not fit beside its predecessor.
FULL_BELOW_BYTES: Final = 1 << 20
# More than `FULL_BELOW_BYTES`, or the state would change with every log line.
ROOM_FROM_BYTES: Final = 2 << 20

_log = logging.getLogger(__name__)


class Condition(StrEnum):
    """Whether the state directory can be written; the values are published."""

    WRITABLE = "writable"
    FULL = "full"
    READ_ONLY = "read-only"
    FAILING = "failing"
    UNAVAILABLE = "unavailable"
    NOT_RESPONDING = "not responding"


_CONDITIONS: Final = {
    errno.ENOSPC: Condition.FULL,
    errno.EDQUOT: Condition.FULL,
    errno.EFBIG: Condition.FULL,
    errno.EROFS: Condition.READ_ONLY,
    **dict.fromkeys(
        (
            *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EACCES, errno.EPERM),
            *(errno.ESTALE, errno.ENOTCONN, errno.ENODEV),
        ),
        Condition.UNAVAILABLE,
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """Whether the state directory can be written, and the bytes of its file system, if they are known."""

    condition: Condition
    free_bytes: int | None = None
    size_bytes: int | None = None


def examine(root: Path, *, write: bool, room_bytes: int = FULL_BELOW_BYTES) -> Finding:
    """Look at the file system of `root`. This blocks: call it in a thread.

    With `write`, a small file is written and removed; the directory is created if it is missing. With less
    than `room_bytes`, the file system counts as full.
    """
    try:
        if write:
            root.mkdir(mode=0o750, exist_ok=True)
        status = os.statvfs(root)
    except OSError as error:
        return Finding(condition_of(error))
    free, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    condition = Condition.WRITABLE
    if status.f_flag & os.ST_RDONLY:
        condition = Condition.READ_ONLY
    elif (size and free < room_bytes) or (status.f_files and not status.f_favail):
        condition = Condition.FULL
    elif write:
        try:
            try_out(root)
        except OSError as error:
            condition = condition_of(error)
    return Finding(condition, free, size)


def condition_of(error: OSError) -> Condition:
    """Return what a file system error means."""
    return _CONDITIONS.get(error.errno or 0, Condition.FAILING)


class StorageWatch:
    """Watches the state directory while the agent runs.

    Parameters
    ----------
    root
        The state directory.
    on_change
        Called with the condition whenever it changes. The first condition is `WRITABLE`.
    look
        `examine` except in tests.
    clock
        Returns seconds; `time.monotonic` except in tests.
    """

    def __init__(
        self,
        root: Path,
        on_change: Callable[[Condition], None],
        *,
        look: Callable[..., Finding] = examine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.condition = Condition.WRITABLE
        self._root = root
        self._on_change = on_change
        self._examine = look
        self._clock = clock
        self._finding = Finding(Condition.WRITABLE)
        self._looking: asyncio.Task[Finding] | None = None
        self._tried_s = float("-inf")
        self._suspected = asyncio.Event()

    @property
    def usage(self) -> Sequence[int]:
        """Free bytes and size of the file system; empty if they are not known."""
        found = self._finding
        return (
            ()
            if found.free_bytes is None or found.size_bytes is None
            else (found.free_bytes, found.size_bytes)
        )

    def suspect(self) -> None:
        """Test the disk soon: something could not be written."""
        self._tried_s = float("-inf")
        self._suspected.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self.look()
            try:
                async with asyncio.timeout(LOOK_INTERVAL_S):
                    await self._suspected.wait()
            except TimeoutError:
                pass
            else:
                self._suspected.clear()

    async def look(self, limit_s: float = RESPONSE_LIMIT_S) -> None:
        """Find out the condition, or that the disk does not respond within `limit_s`."""
        if self._looking is None:
            now_s = self._clock()
            healthy = self.condition is Condition.WRITABLE
            write = not healthy or now_s - self._tried_s >= TRIAL_INTERVAL_S
            if write:
                self._tried_s = now_s
            room_bytes = FULL_BELOW_BYTES if healthy else ROOM_FROM_BYTES
            call = in_disk_thread(self._examine, self._root, write=write, room_bytes=room_bytes)
            self._looking = asyncio.ensure_future(call)
        done, _ = await asyncio.wait({self._looking}, timeout=limit_s)
        if not done:
            self._found(Finding(Condition.NOT_RESPONDING))
            return
        looked, self._looking = self._looking, None
        try:
            finding = looked.result()
        except StoreError as error:  # no thread could be started: that says nothing about the disk
            _log.warning("cannot look at the state directory: %s", error)
        else:
            self._found(finding)

    def _found(self, finding: Finding) -> None:
        self._finding = finding
        before, self.condition = self.condition, finding.condition
        if before is finding.condition:
            return
        if finding.condition is Condition.WRITABLE:
            _log.warning("the state directory %s can be written again", self._root)
        else:
            _log.error(
                "the state directory %s is %s: models are served, but nothing is stored or installed",
                self._root,
                finding.condition,
            )
        self._on_change(finding.condition)
