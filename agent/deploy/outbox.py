"""Retained messages about deployments that the broker does not have yet, kept in a file until it has them.

Only the last message of each topic counts, so the outbox holds one for each. A message is stored before it is
sent, and deleted when the broker has acknowledged it. So even an agent that was restarted while the broker
was away publishes what happened before, including jobs that its journal has forgotten.

Promises: the outbox is bounded in number, bytes and age; the oldest messages are dropped first, and counted.
If the file is damaged, full or unwritable, only the messages in it are lost, and new ones are still sent.
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
from agent.errors import StoreError
from agent.mqtt.reason_codes import CLOSED, NOT_CONNECTED, Action, Reason, reason
from agent.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

FILE: Final = "outbox.db"
# The journal has 64 jobs, and as many forgotten ones may have to be removed; the rest is reserve.
MAX_MESSAGES: Final = 512
# A job takes half a kilobyte, a report of 64 models 20 kilobytes.
MAX_BYTES: Final = 1 << 20
# The result of a deployment is of no use after a month.
MAX_AGE_S: Final = 30 * 86_400.0
_LOG_INTERVAL_S: Final = 60.0
_SCHEMA: Final = 1
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
        Returns seconds since the epoch; tests pass their own.
    """

    def __init__(self, control: Control, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.dropped = 0
        self._control = control
        self._path = folder / FILE
        self._clock = clock
        self._sent: dict[str, int] = {}
        self._count = 0
        self._bytes = 0
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open the file; one that cannot be used is replaced.

        Raises
        ------
        StoreError
            If another agent has the file open.
        """
        for _ in range(2):
            try:
                self._database = self._open()
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise StoreError(
                        f"{self._path} is in use by another agent",
                        hint="stop the other agent, or give this one its own state directory",
                    ) from error
                _log.warning("%s cannot be used and is replaced: %s", self._path, error)
                for suffix in ("", "-wal", "-shm"):
                    with contextlib.suppress(OSError):
                        self._path.with_name(FILE + suffix).unlink(missing_ok=True)
            else:
                return
        _log.error("reports do not survive a restart: cannot create %s", self._path)

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
        if self._database is None:
            return None
        try:
            self._database.execute("BEGIN IMMEDIATE")
            before = self._delete("topic = ?", (topic,))
            number = self._database.execute(
                "INSERT INTO outbox (topic, payload, time_s) VALUES (?, ?, ?)",
                (topic, payload, self._clock()),
            ).lastrowid
            self._count += 1 - before[0]
            self._bytes += len(payload) - before[1]
            self._make_room()
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            self._failed(error)
            return None
        return number

    def _make_room(self) -> None:
        too_old = self._delete("time_s < ?", (self._clock() - MAX_AGE_S,))
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

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            _prepare(database)
            self._measure(database)
        except BaseException:
            database.close()
            raise
        return database

    def _measure(self, database: sqlite3.Connection) -> None:
        self._count, self._bytes = database.execute(
            "SELECT COUNT(*), COALESCE(SUM(LENGTH(payload)), 0) FROM outbox"
        ).fetchone()

    def _failed(self, error: sqlite3.Error) -> None:
        """Count a message that could not be stored, and go on."""
        self.dropped += 1
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._measure(self._database)
        self._complain(f"a report cannot be stored: {error}")

    def _complain(self, text: str) -> None:
        self._rate_limited_log.error("%.400s", text)


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
