"""Remembered answers that survive the agent's death; those that were not delivered are delivered later.

A database of one table beside the agent. It is written before an answer is published and never waits for
the disk: it has to survive this process, not the machine. After a power cut nothing in it is believed
(the boot's number is kept with it); the broker delivers again what was not acknowledged, and it runs
again. So it belongs in memory (/run), where it spares an SD card; on a disk it does no harm.

Promises: bounded in count, bytes and age, with what was dropped counted; a damaged, full or unwritable
database costs what it remembers and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sqlite3
import time
from pathlib import Path
from typing import Final

from agent.errors import StoreError
from agent.service import answers
from agent.service.answers import AnswerRecord, FinalAnswer, ReplyTo, RequestKey

_log = logging.getLogger(__name__)

FILE: Final = "answers.db"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SCHEMA: Final = 1
# Expired entries are looked for so often; what they take meanwhile is bounded anyway.
_SWEEP_INTERVAL_S: Final = 5.0
_LOG_INTERVAL_S: Final = 60.0
_TABLES: Final = """
CREATE TABLE meta (schema INTEGER, boot TEXT);
CREATE TABLE answers (
  number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB UNIQUE, deadline_s REAL, cheap INTEGER, bytes INTEGER,
  head TEXT, payload BLOB
);
CREATE INDEX answers_deadline ON answers (deadline_s);
CREATE INDEX answers_order ON answers (cheap, number);
CREATE TABLE undelivered (key BLOB PRIMARY KEY) WITHOUT ROWID;
"""


class DurableAnswers:
    """Remembers in a file.

    Parameters
    ----------
    folder
        Where the file is, or is made.
    boot
        What changes with each start of the machine.

    Raises
    ------
    StoreError
        If another agent has the file open: its answers are its own.
    """

    def __init__(self, folder: Path, boot: str | None = None) -> None:
        self.dropped = 0
        self._path = folder / FILE
        self._boot = _boot_id() if boot is None else boot
        self._counts = [0, 0]
        self._bytes = [0, 0]
        self._delivered: list[tuple[bytes]] = []
        self._swept_s = time.monotonic()
        self._logged_s = float("-inf")
        self._database: sqlite3.Connection | None = None
        for _ in range(2):
            try:
                self._database = self._open()
                break
            except sqlite3.Error as error:
                if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise StoreError(
                        f"{self._path} is in use by another agent",
                        hint="stop the other, or give this one its own state directory",
                    ) from error
                _log.warning("%s cannot be used and is made anew: %s", self._path, error)
                with contextlib.suppress(OSError):
                    self._remove()
        if self._database is None:
            _log.error("answers are not remembered: %s cannot be made", self._path)

    def get(self, key: RequestKey) -> FinalAnswer | None:
        """Return the answer that this request got, if it is remembered."""
        if self._database is None:
            return None
        try:
            row = self._database.execute(
                "SELECT head, payload, deadline_s FROM answers WHERE key = ? AND deadline_s >= ?",
                (key.digest, time.monotonic()),
            ).fetchone()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        return None if row is None else _record(key, *row).answer

    def put(self, record: AnswerRecord, *, cheap: bool) -> None:
        """Remember an answer that is about to be published."""
        database = self._database
        if database is None:
            self.dropped += 1
            return
        size = len(record.answer.payload)
        if size > answers.MAX_ANSWER_BYTES:
            self.dropped += 1
            return
        try:
            database.execute("BEGIN")
            self._note_delivered(database)
            try:
                self._insert(database, record, size, cheap=cheap)
            except sqlite3.IntegrityError:  # its predecessor expired and is still here
                self._forget("key = ?", (record.key.digest,))
                self._insert(database, record, size, cheap=cheap)
            database.execute("INSERT INTO undelivered VALUES (?)", (record.key.digest,))
            self._counts[cheap] += 1
            self._bytes[cheap] += size
            self._make_room(cheap=cheap)
            database.execute("COMMIT")
        except sqlite3.Error as error:
            self._failed(error)

    def delivered(self, key: RequestKey) -> None:
        """Take note that the broker has the answer.

        It is written with the next answer: should the process die before, the answer is delivered once more.
        """
        self._delivered.append((key.digest,))

    def undelivered(self) -> list[AnswerRecord]:
        """Return the answers that an earlier process has not delivered and that are still of use."""
        if self._database is None:
            return []
        try:
            rows = self._database.execute(
                "SELECT key, head, payload, deadline_s FROM undelivered JOIN answers USING (key)"
                " WHERE deadline_s >= ? ORDER BY number",
                (time.monotonic(),),
            ).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return []
        return [
            _record(RequestKey(key), head, payload, deadline_s) for key, head, payload, deadline_s in rows
        ]

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._note_delivered(self._database)
            self._database.close()
            self._database = None

    @staticmethod
    def _insert(database: sqlite3.Connection, record: AnswerRecord, size: int, *, cheap: bool) -> None:
        database.execute(
            "INSERT INTO answers (key, deadline_s, cheap, bytes, head, payload) VALUES (?, ?, ?, ?, ?, ?)",
            (
                record.key.digest,
                record.reply.deadline_s,
                int(cheap),
                size,
                _head(record),
                record.answer.payload,
            ),
        )

    def _note_delivered(self, database: sqlite3.Connection) -> None:
        if self._delivered:
            database.executemany("DELETE FROM undelivered WHERE key = ?", self._delivered)
            self._delivered.clear()

    def _open(self) -> sqlite3.Connection:
        database = _connect(self._path)
        try:
            if not self._is_ours(database):
                database.close()
                self._remove()
                database = _connect(self._path)
                database.executescript(_TABLES)
                database.execute("INSERT INTO meta VALUES (?, ?)", (_SCHEMA, self._boot))
            self._count(database)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _count(self, database: sqlite3.Connection) -> None:
        self._counts, self._bytes = [0, 0], [0, 0]
        for cheap, count, size in database.execute(
            "SELECT cheap, COUNT(*), SUM(bytes) FROM answers GROUP BY cheap"
        ):
            self._counts[cheap], self._bytes[cheap] = count, size

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        """Whether it is of this boot and of this version's form."""
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return False
        return database.execute("SELECT schema, boot FROM meta").fetchall() == [(_SCHEMA, self._boot)]

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm", "-journal"):
            self._path.with_name(FILE + suffix).unlink(missing_ok=True)

    def _make_room(self, *, cheap: bool) -> None:
        now_s = time.monotonic()
        most = answers.MAX_REFUSALS if cheap else answers.MAX_ANSWERS
        full = self._counts[cheap] > most or self._bytes[cheap] > answers.MAX_ANSWER_BYTES
        if full or now_s - self._swept_s >= _SWEEP_INTERVAL_S:
            self._swept_s = now_s
            self._forget("deadline_s < ?", (now_s,))
        while self._counts[cheap] > most or self._bytes[cheap] > answers.MAX_ANSWER_BYTES:
            self.dropped += self._forget(
                "number = (SELECT MIN(number) FROM answers WHERE cheap = ?)", (int(cheap),)
            )

    def _forget(self, condition: str, values: tuple[object, ...]) -> int:
        assert self._database is not None
        gone = self._database.execute(
            f"DELETE FROM answers WHERE {condition} RETURNING key, cheap, bytes",  # noqa: S608 - ours, all three
            values,
        ).fetchall()
        for key, cheap, size in gone:
            self._counts[cheap] -= 1
            self._bytes[cheap] -= size
            self._database.execute("DELETE FROM undelivered WHERE key = ?", (key,))
        return len(gone)

    def _failed(self, error: sqlite3.Error) -> None:
        """Live on without what could not be written."""
        self.dropped += 1
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._count(self._database)
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            _log.error("an answer is not remembered: %s", error)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = OFF")
    return database


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return f"no boot id, started {time.time() - time.monotonic():.0f}"


def _head(record: AnswerRecord) -> str:
    reply, answer = record.reply, record.answer
    correlation = None if reply.correlation is None else reply.correlation.hex()
    return json.dumps(
        [
            reply.topic,
            correlation,
            reply.qos,
            reply.trace,
            answer.status,
            answer.message,
            answer.content_type,
            answer.user,
        ]
    )


def _record(key: RequestKey, head: str, payload: bytes, deadline_s: float) -> AnswerRecord:
    topic, correlation, qos, trace, status, message, content_type, user = json.loads(head)
    return AnswerRecord(
        key,
        ReplyTo(
            topic,
            None if correlation is None else bytes.fromhex(correlation),
            qos,
            deadline_s,
            tuple((name, value) for name, value in trace),
        ),
        FinalAnswer(status, message, content_type, payload, tuple((name, value) for name, value in user)),
    )
