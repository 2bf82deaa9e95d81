"""Retained messages about deployments that the broker does not have yet, kept in a file until it has them.

Only the last message of each topic counts, so the outbox holds one for each. A message is stored before it is
sent, and deleted when the broker has acknowledged it. So even an agent that was restarted while the broker
was away publishes what happened before, including jobs that its journal has forgotten.

All messages are in memory, and the file follows: changes are written in a thread, one batch after the other.
While the file cannot be written, or the disk does not respond, messages are sent without it; everything is
written again when it can be used.

Promises: no call waits for the disk. The outbox is bounded in number, bytes and age; the oldest messages are
dropped first, and counted. Ages count the time that agents ran, so a clock that jumps drops nothing. If the
file is damaged, only the messages in it are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.deploy.interfaces import Control
from agent.deploy.store.outbox_file import FILE, OutboxFile, OutboxRow
from agent.deploy.store.state_file import SAVE_LIMIT_S
from agent.disk_thread import in_disk_thread
from agent.errors import InUseError, StoreError
from agent.mqtt.reason_codes import CLOSED, NOT_CONNECTED, Action, Reason
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

# The journal has 64 jobs, and as many forgotten ones may have to be removed; the rest is reserve.
MAX_MESSAGES: Final = 512
# A job takes half a kilobyte, a report of 64 models 20 kilobytes.
MAX_BYTES: Final = 1 << 20
# The result of a deployment is of no use after a month in which the broker was away and the agent ran.
MAX_AGE_S: Final = 30 * 86_400.0
_LOG_INTERVAL_S: Final = 60.0


@dataclass(slots=True, eq=False)
class _Kept:
    """A message, and the future that gets the broker's verdict; `made_s` is on the outbox's clock."""

    topic: str
    payload: bytes
    made_s: float
    verdict: asyncio.Future[Reason]
    stored: bool = False
    under_way: bool = False


class Outbox:
    """A control connection that keeps retained messages until the broker has them.

    Parameters
    ----------
    control
        The connection.
    folder
        The folder of the file.
    clock
        Returns seconds; `time.monotonic` except in tests.
    """

    def __init__(self, control: Control, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = 0
        self._control = control
        self._folder = folder
        self._clock = clock
        # By topic, the oldest first.
        self._kept: dict[str, _Kept] = {}
        self._bytes = 0
        self._file: OutboxFile | None = None
        # Until the file was read once it may have other messages; those on these topics are out of date.
        self._was_read = False
        self._newer: set[str] = set()
        # What the file has of these topics is not what `_kept` has; None if that is so of all.
        self._unwritten: set[str] | None = set()
        # `made_s` and this are the time in the file.
        self._offset_s = -clock()
        self._opening: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)

    async def open(self, limit_s: float = SAVE_LIMIT_S) -> None:
        """Open the file, or else go on without it; if that takes longer than `limit_s`, it is used later.

        Raises
        ------
        InUseError
            If another agent has the file open.
        """
        self.use_file()
        assert self._opening is not None
        done, _ = await asyncio.wait({self._opening}, timeout=limit_s)
        if not done:
            _log.error("reports are kept in memory: %s does not respond", self._folder)
        elif (error := self._opening.exception()) is not None:
            raise error

    def use_file(self) -> None:
        """Use the file if it is not in use: the disk may work again."""
        if self._file is None and (self._opening is None or self._opening.done()):
            self._opening = asyncio.get_running_loop().create_task(self._open())
            self._opening.add_done_callback(_log_failure)

    async def _open(self) -> None:
        try:
            file, rows = await in_disk_thread(_open_and_read, self._folder)
        except InUseError:
            raise
        except StoreError as error:
            _log.error("reports are kept in memory: %s", error)
            return
        if not self._was_read:
            self._adopt(rows)
        elif rows or self._kept:
            self._unwritten = None
        self._file = file
        _log.debug("reports are kept in %s", self._folder / FILE)
        self._store()

    def _adopt(self, rows: list[OutboxRow]) -> None:
        """Take what an earlier agent left in the file, unless there are newer messages."""
        self._was_read = True
        began_s, newest_s = -self._offset_s, max((row.time_s for row in rows), default=0.0)
        self._offset_s += newest_s
        made, self._kept, self._bytes = tuple(self._kept.values()), {}, 0
        for row in rows:
            if row.topic not in self._newer:
                made_s = began_s - (newest_s - row.time_s)
                self._add(_Kept(row.topic, row.payload, made_s, _future(), stored=True))
        for kept in made:
            self._add(kept)
        self._unwritten = None if self._newer else set()
        self._newer.clear()
        self._make_room(self._clock())

    async def close(self, limit_s: float = SAVE_LIMIT_S) -> None:
        """Write what is not in the file yet, and close it; its messages stay."""
        await self.stored(limit_s)
        if self._opening is not None:
            self._opening.cancel()
        file, self._file = self._file, None
        if file is not None and (self._writing is None or self._writing.done()):
            with contextlib.suppress(TimeoutError, StoreError):
                async with asyncio.timeout(limit_s):
                    await in_disk_thread(file.close)

    async def stored(self, limit_s: float = SAVE_LIMIT_S) -> None:
        """Return when the file has everything, or the disk has not responded within `limit_s`."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=limit_s)

    @property
    def waiting(self) -> int:
        """Number of messages that the broker does not have yet."""
        return len(self._kept)

    @property
    def connected(self) -> bool:
        """Whether there is a connection to the broker."""
        return self._control.connected

    @property
    def version(self) -> int:
        """The MQTT version of the connection."""
        return self._control.version

    @property
    def max_packet_bytes(self) -> int:
        """Bytes of the largest packet that can be sent and received, as far as it is known."""
        return self._control.max_packet_bytes

    def publish(
        self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False
    ) -> asyncio.Future[Reason]:
        """Send a message; a retained one at QoS 1 is also kept until the broker has it.

        Without a connection it is only kept, and its future is `NOT_CONNECTED` at once.
        """
        if not retain or qos == 0:
            return self._control.publish(topic, payload, qos=qos, retain=retain)
        now_s = self._clock()
        kept = _Kept(topic, payload, now_s, _future())
        if not self._control.connected:
            kept.verdict.set_result(NOT_CONNECTED)
        self._remove(topic)
        self._add(kept)
        self._make_room(now_s)
        self._store()
        return kept.verdict

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""
        self._control.want(topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._control.unsubscribe(topic_filter)

    def on_connected(self) -> None:
        """Send the kept messages that are not already under way."""
        self._send_stored()

    def _send_stored(self) -> None:
        """Send what is in the file, and everything if there is no file."""
        for kept in tuple(self._kept.values()):
            if kept.stored or self._file is None:
                self._send(kept)

    def _send(self, kept: _Kept) -> None:
        if self._control.connected and not kept.under_way:
            kept.under_way = True
            sent = self._control.publish(kept.topic, kept.payload, qos=1, retain=True)
            sent.add_done_callback(functools.partial(self._settled, kept))

    def _settled(self, kept: _Kept, sent: asyncio.Future[Reason]) -> None:
        kept.under_way = False
        verdict = CLOSED if sent.cancelled() else sent.result()
        if not kept.verdict.done():
            kept.verdict.set_result(verdict)
        if verdict is CLOSED or (verdict.failed and verdict.sending is Action.RETRY):
            return  # sent again at the next connect
        if verdict.failed:
            self.dropped += 1
            self._rate_limited_log.error("a report is dropped: %.200s: %s", kept.topic, verdict)
        if self._kept.get(kept.topic) is kept:
            self._remove(kept.topic)
            self._store()

    def _add(self, kept: _Kept) -> None:
        self._kept[kept.topic] = kept
        self._bytes += len(kept.payload)

    def _remove(self, topic: str) -> None:
        """Forget the message on a topic, if there is one: what the file has of it is out of date."""
        kept = self._kept.pop(topic, None)
        if kept is not None:
            self._bytes -= len(kept.payload)
            if not kept.under_way and not kept.verdict.done():
                kept.verdict.set_result(NOT_CONNECTED)
        if self._unwritten is not None:
            self._unwritten.add(topic)
        if not self._was_read:
            self._newer.add(topic)
        if len(self._newer) > MAX_MESSAGES:  # more than the file may have
            self._was_read, self._unwritten = True, None
            self._newer.clear()

    def _make_room(self, now_s: float) -> None:
        count = 0
        while self._kept:
            oldest = next(iter(self._kept.values()))
            fits = len(self._kept) <= MAX_MESSAGES and self._bytes <= MAX_BYTES
            if fits and oldest.made_s >= now_s - MAX_AGE_S:
                break
            self._remove(oldest.topic)
            count += 1
        if count:
            self.dropped += count
            self._rate_limited_log.error("%d reports are dropped: too old, or too many", count)

    def _store(self) -> None:
        """Write to the file what it does not have, and then send it."""
        if self._file is None or self._unwritten == set():
            self._send_stored()
        elif self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        while (file := self._file) is not None and self._unwritten != set():
            gone, self._unwritten = self._unwritten, set()
            written = [kept for topic, kept in self._kept.items() if gone is None or topic in gone]
            rows = [OutboxRow(kept.topic, kept.payload, kept.made_s + self._offset_s) for kept in written]
            writing = asyncio.ensure_future(in_disk_thread(file.write, gone, rows))
            done, _ = await asyncio.wait({writing}, timeout=SAVE_LIMIT_S)
            error = writing.exception() if done else f"the disk does not respond within {SAVE_LIMIT_S:g} s"
            for kept in written:
                kept.stored = error is None
                if self._kept.get(kept.topic) is not kept:  # a newer one follows, perhaps again and again
                    self._send(kept)
            if error is not None:
                _log.error("reports are kept in memory: %s", error)
                self._file, self._unwritten = None, None
                file.abandon()
            self._send_stored()


def _future() -> asyncio.Future[Reason]:
    return asyncio.get_running_loop().create_future()


def _log_failure(opening: asyncio.Task[None]) -> None:
    if not opening.cancelled() and (error := opening.exception()) is not None:
        _log.error("%s", error)


def _open_and_read(folder: Path) -> tuple[OutboxFile, list[OutboxRow]]:
    file = OutboxFile.open(folder)
    try:
        return file, file.read()
    except BaseException:
        file.close()
        raise
