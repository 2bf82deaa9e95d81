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
from agent.service.requests import answers
from agent.service.requests.answers import AnswerRecord, ReplyTo, RequestKey
from agent.sparing_log import SparingLog
from agent.wire.answer import FinalAnswer

_log = logging.getLogger(__name__)

FILE: Final = "answers.db"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SCHEMA: Final = 3
# Expired entries are looked for so often; what they take meanwhile is bounded anyway.
_SWEEP_INTERVAL_S: Final = 5.0
# And so many are dropped at once: the event loop waits for it.
_SWEEP_ROWS: Final = 64
_LOG_INTERVAL_S: Final = 60.0
# Rows are found by number, which only grows, and keys are looked up in memory: a new row dirties the last
# page of each table and no other, and what is not dirty is not written to the log.
_TABLES: Final = """
CREATE TABLE meta (schema INTEGER, boot TEXT);
CREATE TABLE answers (
  number INTEGER PRIMARY KEY, key BLOB, deadline_s REAL, cheap INTEGER, bytes INTEGER, head TEXT, payload BLOB
);
CREATE TABLE undelivered (number INTEGER PRIMARY KEY);
"""
# The database's own page cache: it holds the last pages, which are all that is used again.
_CACHE_KIB: Final = 256
# Refusals and answers, by the number of their class.
_CLASSES: Final = 2


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
        self._next = 1
        # Key -> number, the oldest first; one for answers that took work, one for refusals.
        self._numbers: tuple[dict[bytes, int], dict[bytes, int]] = ({}, {})
        self._bytes = [0] * _CLASSES
        self._delivered: list[tuple[int]] = []
        self._swept_s = time.monotonic()
        self._sparing_log = SparingLog(_log, _LOG_INTERVAL_S)
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
        number = self._number(key)
        if self._database is None or number is None:
            return None
        try:
            row = self._database.execute(
                "SELECT head, payload, deadline_s FROM answers WHERE number = ? AND deadline_s >= ?",
                (number, time.monotonic() - answers.GRACE_S),
            ).fetchone()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        return None if row is None else _record(key, *row).answer

    def put(self, record: AnswerRecord, *, cheap: bool) -> None:
        """Remember an answer that is about to be published."""
        database = self._database
        size = len(record.answer.payload)
        if database is None or size > answers.MAX_ANSWER_BYTES:
            self.dropped += 1
            return
        digest = record.key.digest
        try:
            database.execute("BEGIN")
            if self._delivered:
                database.executemany("DELETE FROM undelivered WHERE number = ?", self._delivered)
            before = self._number(record.key)
            if before is not None:  # it expired and is still here
                self._forget(before)
            number = self._next
            database.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    number,
                    digest,
                    record.reply.deadline_s,
                    int(cheap),
                    size,
                    _head(record),
                    record.answer.payload,
                ),
            )
            database.execute("INSERT INTO undelivered VALUES (?)", (number,))
            self._next += 1
            self._numbers[cheap][digest] = number
            self._bytes[cheap] += size
            self._make_room(cheap=cheap)
            database.execute("COMMIT")
            self._delivered.clear()
        except sqlite3.Error as error:
            self._failed(error)

    def delivered(self, key: RequestKey) -> None:
        """Take note that the broker has the answer.

        It is written with the next answer: should the process die before, the answer is delivered once more.
        """
        number = self._number(key)
        if number is not None:
            self._delivered.append((number,))

    def undelivered(self) -> list[AnswerRecord]:
        """Return the answers that an earlier process has not delivered and that are still of use."""
        if self._database is None:
            return []
        try:
            rows = self._database.execute(
                "SELECT key, head, payload, deadline_s FROM undelivered JOIN answers USING (number)"
                " WHERE deadline_s >= ? ORDER BY number",
                (time.monotonic(),),
            ).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return []
        return [
            _record(RequestKey(key), head, payload, deadline_s) for key, head, payload, deadline_s in rows
        ]

    @property
    def waiting(self) -> int:
        """How many answers the broker does not have."""
        if self._database is None:
            return 0
        with contextlib.suppress(sqlite3.Error):
            (count,) = self._database.execute("SELECT COUNT(*) FROM undelivered").fetchone()
            return max(0, int(count) - len(self._delivered))
        return 0

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error):
                self._note_delivered(self._database)
            self._database.close()
            self._database = None

    def _number(self, key: RequestKey) -> int | None:
        number = self._numbers[0].get(key.digest)
        return self._numbers[1].get(key.digest) if number is None else number

    def _note_delivered(self, database: sqlite3.Connection) -> None:
        if self._delivered:
            database.executemany("DELETE FROM undelivered WHERE number = ?", self._delivered)
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
            self._read_index(database)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _read_index(self, database: sqlite3.Connection) -> None:
        self._numbers, self._bytes = ({}, {}), [0] * _CLASSES
        for number, key, cheap, size in database.execute(
            "SELECT number, key, cheap, bytes FROM answers ORDER BY number"
        ):
            self._numbers[cheap][key] = number
            self._bytes[cheap] += size
            self._next = max(self._next, number + 1)

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
        if now_s - self._swept_s >= _SWEEP_INTERVAL_S:
            assert self._database is not None
            expired = self._database.execute(
                "SELECT number FROM answers WHERE deadline_s < ? LIMIT ?",
                (now_s - answers.GRACE_S, _SWEEP_ROWS),
            ).fetchall()
            if len(expired) < _SWEEP_ROWS:
                self._swept_s = now_s
            for (number,) in expired:
                self._forget(number)
        numbers = self._numbers[cheap]
        most = answers.MAX_REFUSALS if cheap else answers.MAX_ANSWERS
        while len(numbers) > most or self._bytes[cheap] > answers.MAX_ANSWER_BYTES:
            self.dropped += self._forget(next(iter(numbers.values()))) >= now_s

    def _forget(self, number: int) -> float:
        """Drop one, and return when it would have expired."""
        database = self._database
        assert database is not None
        # Both are read to the end: a statement that is not holds the log.
        [(key, cheap, size, deadline_s)] = database.execute(
            "DELETE FROM answers WHERE number = ? RETURNING key, cheap, bytes, deadline_s", (number,)
        ).fetchall()
        database.execute("DELETE FROM undelivered WHERE number = ?", (number,))
        self._numbers[cheap].pop(key, None)
        self._bytes[cheap] -= size
        until_s: float = deadline_s
        return until_s

    def _failed(self, error: sqlite3.Error) -> None:
        """Live on without what could not be written."""
        self.dropped += 1
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._read_index(self._database)
        self._sparing_log.error("an answer is not remembered: %s", error)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = OFF")
    database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
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
            answer.model_version,
            answer.tensors,
        ]
    )


def _record(key: RequestKey, head: str, payload: bytes, deadline_s: float) -> AnswerRecord:
    topic, correlation, qos, trace, status, message, content_type, version, tensors = json.loads(head)
    return AnswerRecord(
        key,
        ReplyTo(
            topic,
            None if correlation is None else bytes.fromhex(correlation),
            qos,
            deadline_s,
            tuple((name, value) for name, value in trace),
        ),
        FinalAnswer(status, message, content_type, payload, version, tuple(tensors)),
    )
