"""Retained messages about deployments that the broker does not have yet, kept in a file until it has them.

Only the last message of each topic counts, so the outbox holds one for each. A message is stored before it is
sent, and deleted when the broker has acknowledged it. So even an agent that was restarted while the broker
was away publishes what happened before, including jobs that its journal has forgotten.

While the file cannot be written, the messages are kept in memory, and they are moved to the file when it can
be used again.

Promises: the outbox is bounded in number, bytes and age; the oldest messages are dropped first, and counted.
Ages count the time that agents ran, so a clock that jumps drops nothing. If the file is damaged, only the
messages in it are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.deploy.interfaces import Control
from agent.deploy.store.database_file import open_database
from agent.errors import InUseError
from agent.mqtt.reason_codes import CLOSED, NOT_CONNECTED, Action, Reason, reason
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

FILE: Final = "outbox.db"
# The journal has 64 jobs, and as many forgotten ones may have to be removed; the rest is reserve.
MAX_MESSAGES: Final = 512
# A job takes half a kilobyte, a report of 64 models 20 kilobytes.
MAX_BYTES: Final = 1 << 20
# The result of a deployment is of no use after a month in which the broker was away and the agent ran.
MAX_AGE_S: Final = 30 * 86_400.0
_LOG_INTERVAL_S: Final = 60.0
_SCHEMA: Final = 1
_MEMORY: Final = ":memory:"
_TABLE: Final = """
CREATE TABLE outbox (
  number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT UNIQUE, payload BLOB NOT NULL, time_s REAL NOT NULL
)
"""


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
        self._path = folder / FILE
        self._clock = clock
        self._sent: dict[str, int] = {}
        self._count = 0
        self._bytes = 0
        self._newest_s = 0.0
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._database: sqlite3.Connection | None = None
        self._in_memory = False
        # Topics of messages that are newer than what the file has of them, while it cannot be used; None if
        # everything in it is known to be older.
        self._newer: set[str] | None = set()
        # The clock's reading at the time `_newest_s`.
        self._began_s = clock()

    def open(self) -> None:
        """Open the file, or else keep messages in memory; `open_file` and then `adopt` do the same.

        Raises
        ------
        InUseError
            If another agent has the file open.
        """
        self.adopt(self.open_file())

    def open_file(self) -> sqlite3.Connection | None:
        """Return the database of the file, which is replaced if it cannot be used; None if that fails.

        This blocks: call it in a thread.

        Raises
        ------
        InUseError
            If another agent has the file open.
        """
        return open_database(self._path, _open)

    def adopt(self, file: sqlite3.Connection | None) -> None:
        """Use the database that `open_file` returned, or memory without one."""
        self._in_memory = file is None
        if file is None:
            _log.error("reports are kept in memory: %s cannot be used", self._path)
        self._database = _open(_MEMORY) if file is None else file
        self._measure(self._database)

    def use_file(self) -> None:
        """Move messages that are kept in memory to the file, if it can be used again."""
        memory = self._database
        if not self._in_memory or memory is None:
            return
        try:
            file = self.open_file()
        except InUseError as error:
            _log.error("%s", error)
            return
        if file is None:
            return
        try:
            file.execute("BEGIN IMMEDIATE")
            for (topic,) in file.execute("SELECT topic FROM outbox").fetchall():
                if self._newer is None or topic in self._newer:
                    file.execute("DELETE FROM outbox WHERE topic = ?", (topic,))
            file.executemany("INSERT OR REPLACE INTO outbox VALUES (?, ?, ?, ?)", _rows(memory))
            file.execute("COMMIT")
        except sqlite3.Error as error:
            _log.warning("reports stay in memory: %s", error)
            file.close()
            return
        memory.close()
        self._database, self._in_memory, self._newer = file, False, set()
        self._measure(file)
        _log.warning("reports are kept in %s again", self._path)

    def _use_memory(self) -> None:
        """Keep messages in memory, those in the file too if they can still be read."""
        file = self._database
        assert file is not None
        self._database, self._in_memory, self._newer = _open(_MEMORY), True, set()
        try:
            rows = _rows(file)
        except sqlite3.Error:
            pass
        else:
            self._database.executemany("INSERT INTO outbox VALUES (?, ?, ?, ?)", rows)
            self._newer = None
        with contextlib.suppress(sqlite3.Error):
            file.close()
        self._measure(self._database)
        _log.error("reports are kept in memory: %s cannot be written", self._path)

    def close(self) -> None:
        """Close the file; its messages stay."""
        if self._database is not None:
            self._database.close()
            self._database = None

    @property
    def waiting(self) -> int:
        """Number of messages that the broker does not have yet."""
        return self._count

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
        number = self._keep(topic, payload)
        if number is None or self._control.connected:
            return self._send(number, topic, payload)
        kept: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        kept.set_result(NOT_CONNECTED)
        return kept

    def want(self, topic_filter: str, qos: int = 1) -> None:
        """Subscribe, now and after each reconnection."""
        self._control.want(topic_filter, qos)

    def unsubscribe(self, topic_filter: str) -> None:
        """End a subscription."""
        self._control.unsubscribe(topic_filter)

    def on_connected(self) -> None:
        """Send the kept messages that are not already under way."""
        if self._database is None:
            return
        try:
            rows = self._database.execute(
                "SELECT number, topic, payload FROM outbox ORDER BY number"
            ).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return
        for number, topic, payload in rows:
            if self._sent.get(topic) != number:
                self._send(number, topic, payload)

    def _send(self, number: int | None, topic: str, payload: bytes) -> asyncio.Future[Reason]:
        sent = self._control.publish(topic, payload, qos=1, retain=True)
        if number is not None:
            self._sent[topic] = number
            sent.add_done_callback(functools.partial(self._settled, number, topic))
        return sent

    def _settled(self, number: int, topic: str, sent: asyncio.Future[Reason]) -> None:
        if self._sent.get(topic) == number:
            del self._sent[topic]
        verdict = reason(0) if sent.cancelled() else sent.result()
        if verdict is CLOSED or sent.cancelled() or (verdict.failed and verdict.sending is Action.RETRY):
            return  # sent again at the next connect
        if verdict.failed:
            self.dropped += 1
            self._complain(f"a report is dropped: {topic}: {verdict}")
        self._forget("number = ?", (number,))

    def _keep(self, topic: str, payload: bytes) -> int | None:
        """Store a message instead of the topic's last one; return its number, or None if that fails."""
        for _ in range(2):
            if self._database is None:
                return None
            try:
                return self._insert(topic, payload)
            except sqlite3.Error as error:
                self._failed(error)  # which goes on in memory
        return None

    def _insert(self, topic: str, payload: bytes) -> int | None:
        assert self._database is not None
        self._database.execute("BEGIN IMMEDIATE")
        before = self._delete("topic = ?", (topic,))
        number = self._database.execute(
            "INSERT INTO outbox (topic, payload, time_s) VALUES (?, ?, ?)", (topic, payload, self._now_s())
        ).lastrowid
        self._count += 1 - before[0]
        self._bytes += len(payload) - before[1]
        self._make_room()
        self._database.execute("COMMIT")
        if self._in_memory and self._newer is not None:
            self._newer.add(topic)
            if len(self._newer) > MAX_MESSAGES:
                self._newer = None
        return number

    def _now_s(self) -> float:
        """Return the time since the first message, without the times in which no agent ran."""
        return self._newest_s + self._clock() - self._began_s

    def _make_room(self) -> None:
        too_old = self._delete("time_s < ?", (self._now_s() - MAX_AGE_S,))
        self._subtract(too_old, dropped=True)
        while self._count > MAX_MESSAGES or self._bytes > MAX_BYTES:
            oldest = self._delete("number = (SELECT MIN(number) FROM outbox)", ())
            if not oldest[0]:
                return
            self._subtract(oldest, dropped=True)

    def _forget(self, condition: str, values: tuple[object, ...]) -> None:
        if self._database is None:
            return
        try:
            self._subtract(self._delete(condition, values), dropped=False)
        except sqlite3.Error as error:
            self._failed(error)

    def _subtract(self, gone: tuple[int, int], *, dropped: bool) -> None:
        self._count -= gone[0]
        self._bytes -= gone[1]
        if dropped and gone[0]:
            self.dropped += gone[0]
            self._complain(f"{gone[0]} reports are dropped: too old, or too many")

    def _delete(self, condition: str, values: tuple[object, ...]) -> tuple[int, int]:
        """Delete rows; return their number and the bytes of their payloads."""
        assert self._database is not None
        gone = self._database.execute(
            f"DELETE FROM outbox WHERE {condition} RETURNING LENGTH(payload)",  # noqa: S608 - the conditions are constants of this file
            values,
        ).fetchall()
        return len(gone), sum(size for (size,) in gone)

    def _measure(self, database: sqlite3.Connection) -> None:
        self._began_s = self._clock()
        self._count, self._bytes, self._newest_s = database.execute(
            "SELECT COUNT(*), COALESCE(SUM(LENGTH(payload)), 0), COALESCE(MAX(time_s), 0) FROM outbox"
        ).fetchone()

    def _failed(self, error: sqlite3.Error) -> None:
        """Go on without the file."""
        self._complain(f"a report cannot be stored: {error}")
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        if self._in_memory:
            self.dropped += 1
            self._measure(self._database)
        else:
            self._use_memory()

    def _complain(self, text: str) -> None:
        self._rate_limited_log.error("%.400s", text)


def _rows(database: sqlite3.Connection) -> list[tuple[object, ...]]:
    return database.execute("SELECT number, topic, payload, time_s FROM outbox").fetchall()


def _open(name: str) -> sqlite3.Connection:
    # The file is opened in a thread, and then used by one other thread only.
    database = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
    try:
        _prepare(database)
        if name == _MEMORY:
            # Numbers that no message in a file has: an acknowledgement is for one message.
            database.execute("INSERT INTO sqlite_sequence VALUES ('outbox', ?)", (time.time_ns() // 1000,))
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA cache_size = 16")  # pages: the file is read only at the start
    database.execute("PRAGMA journal_mode = WAL")
    # The journal of jobs restores what a power cut takes; the file itself stays intact.
    database.execute("PRAGMA synchronous = NORMAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, _SCHEMA):
        raise sqlite3.DatabaseError(f"expected schema {_SCHEMA}, got {version}")
    if version == 0:
        database.execute("BEGIN IMMEDIATE")
        database.execute(_TABLE)
        database.execute(f"PRAGMA user_version = {_SCHEMA}")
        database.execute("COMMIT")
