"""Answers that were given, kept so that a repeated request is not computed again and no answer is lost.

Two requests are the same if their topic, Response Topic, Correlation Data and the SHA-256 of their payload
are equal; clients that happen to choose equal Correlation Data are kept apart. An answer is remembered until
`GRACE_S` after the request's expiry, because a second delivery may be that late, in a broker or on a busy
machine. Refusals that cost nothing (a full queue, an unknown model) have a separate limit, so that a storm of
them drops no answer that took work. When there are too many, the client with the most loses its oldest: one
that asks much does not make the answers of others be forgotten.

The answers are in an SQLite database. It is written before an answer is published and never waits for the
disk: it must outlive this process, not the machine. After a power cut its content is not trusted (it holds
the id of the boot): the broker delivers again what was not acknowledged, and that is computed again. So the
file belongs in memory (/run), which spares the SD card; on a disk it does no harm.

While the file cannot be written, the database is in this process's memory: repeated requests are recognised
as before, but not by the next process. The file is tried again once a minute.

Promises: the database is bounded in count, bytes and age; answers that are dropped early are counted; if the
database is damaged, only the answers in it are lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agent.deploy.store.database_file import open_database, remove_database
from agent.errors import InUseError
from agent.rate_limited_log import RateLimitedLog
from agent.service.requests.answer_index import SHARED, AnswerIndex
from agent.wire.answer import FinalAnswer

_log = logging.getLogger(__name__)

# At 34 requests a second these last two minutes: the default deadline and `GRACE_S`. The bytes are those of
# payloads and heads; an entry takes about 200 bytes more.
MAX_ANSWERS: Final = 4096
MAX_ANSWER_BYTES: Final = 16 << 20
MAX_REFUSALS: Final = 4096
# A second delivery of a request is recognised until this long after the request's deadline.
GRACE_S: Final = 60.0
_LENGTH: Final = struct.Struct(">I")

FILE: Final = "answers.db"
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SCHEMA: Final = 6
_MEMORY: Final = ":memory:"
# How often a file is tried again that could not be written.
_RETRY_INTERVAL_S: Final = 60.0
# Expired answers are looked for this often; until then they count towards the limits above.
_SWEEP_INTERVAL_S: Final = 5.0
# At most this many are dropped at once, because the event loop waits for it.
_SWEEP_ROWS: Final = 64
_LOG_INTERVAL_S: Final = 60.0
# Rows are found by a number that only grows, and keys are looked up in memory: a new row dirties only the
# last page of each table, and only dirty pages are written to the log.
_TABLES: Final = """
CREATE TABLE meta (schema INTEGER, boot TEXT);
CREATE TABLE answers (
  number INTEGER PRIMARY KEY, key BLOB, deadline_s REAL, cheap INTEGER, bytes INTEGER, client TEXT, head TEXT,
  payload BLOB
);
CREATE TABLE undelivered (number INTEGER PRIMARY KEY);
"""
# The database's own page cache holds the last pages; no others are used again.
_CACHE_KIB: Final = 256
# Answers that took work are class 0, refusals class 1.
_CLASSES: Final = 2


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Equal for two deliveries of the same request.

    It is the SHA-256 over the request's topics and Correlation Data, each after its length, and the SHA-256
    of its payload.
    """

    digest: bytes

    @classmethod
    def of(cls, topic: str, reply_to: str, correlation: bytes, payload_digest: bytes) -> RequestKey:
        """Make the key of one request, given the SHA-256 of its payload."""
        names = (topic.encode(), reply_to.encode(), correlation)
        whole = hashlib.sha256(b"".join(part for name in names for part in (_LENGTH.pack(len(name)), name)))
        whole.update(payload_digest)
        return cls(whole.digest())


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where an answer goes, and the user properties of the request that it carries on.

    At `deadline_s` it becomes useless, on `time.monotonic`: one clock for all processes of one boot.
    """

    topic: str
    correlation: bytes | None
    qos: int
    deadline_s: float
    trace: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """An answer, the request that it answers, where it goes, and who asked, unless that was in a file."""

    key: RequestKey
    reply: ReplyTo
    answer: FinalAnswer
    client: str = field(default=SHARED, compare=False)


class AnswerStore:
    """Remembers answers, and which of them the broker does not have yet.

    The database is in `folder`, or in memory if that is None. A file that another agent has open raises
    InUseError. `boot` changes with each start of the machine; None stands for the kernel's boot id.
    """

    def __init__(
        self, folder: Path | None, boot: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.dropped = 0
        self._clock = clock
        self._path = Path(_MEMORY) if folder is None else folder / FILE
        self._has_file = folder is not None
        self._boot = _boot_id() if boot is None else boot
        self._next = 1
        # One for answers that took work, one for refusals.
        self._indexes = [AnswerIndex() for _ in range(_CLASSES)]
        self._delivered: list[tuple[int]] = []
        self._swept_s = clock()
        self._rate_limited_log = RateLimitedLog(_log, _LOG_INTERVAL_S)
        self._tried_s = clock()
        self._in_memory = False
        self._database: sqlite3.Connection | None = self._open_file()
        if self._database is None:
            _log.error("answers are kept in memory: %s cannot be used", self._path)
            self._in_memory = True
            self._database = self._open(_MEMORY)
        self._read_index(self._database)

    def _open_file(self) -> sqlite3.Connection | None:
        return open_database(self._path, self._open) if self._has_file else None

    def get(self, key: RequestKey) -> FinalAnswer | None:
        """Return the answer that a request got, or None if it is not remembered."""
        number = self._number(key)
        if self._database is None or number is None:
            return None
        try:
            row = self._database.execute(
                "SELECT head, payload, deadline_s FROM answers WHERE number = ? AND deadline_s >= ?",
                (number, self._clock() - GRACE_S),
            ).fetchone()
        except sqlite3.Error as error:
            self._failed(error)
            return None
        record = None if row is None else self._read(key, *row)
        return None if record is None else record.answer

    def put(self, record: AnswerRecord, *, cheap: bool) -> None:
        """Remember an answer that is about to be published; `cheap` is a refusal that took no work."""
        head = _head(record)
        size = len(head) + len(record.answer.payload)
        if self._database is None or size > MAX_ANSWER_BYTES:
            self.dropped += 1
            return
        if self._in_memory and self._clock() - self._tried_s >= _RETRY_INTERVAL_S:
            self._use_file()
        try:
            self._insert(self._database, record, head, size, cheap=cheap)
        except sqlite3.Error as error:
            self._failed(error)
            if self._in_memory:  # it was the file that failed
                with contextlib.suppress(sqlite3.Error):
                    self._insert(self._database, record, head, size, cheap=cheap)

    def _insert(
        self, database: sqlite3.Connection, record: AnswerRecord, head: str, size: int, *, cheap: bool
    ) -> None:
        digest = record.key.digest
        database.execute("BEGIN")
        if self._delivered:
            database.executemany("DELETE FROM undelivered WHERE number = ?", self._delivered)
        before = self._number(record.key)
        if before is not None:  # it has expired, but was not swept yet
            self._forget(before)
        number = self._next
        database.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                number,
                digest,
                record.reply.deadline_s,
                int(cheap),
                size,
                record.client,
                head,
                record.answer.payload,
            ),
        )
        database.execute("INSERT INTO undelivered VALUES (?)", (number,))
        self._next += 1
        self._indexes[cheap].add(digest, number, record.client, size)
        self._make_room(number, cheap=cheap)
        database.execute("COMMIT")
        self._delivered.clear()

    def delivered(self, key: RequestKey) -> None:
        """Take note that the broker has the answer.

        This is written together with the next answer; if the process dies before that, the answer is
        delivered once more.
        """
        number = self._number(key)
        if number is not None:
            self._delivered.append((number,))

    def undelivered(self) -> list[AnswerRecord]:
        """Return the answers that an earlier process did not deliver and whose deadline has not passed."""
        if self._database is None:
            return []
        try:
            rows = self._database.execute(
                "SELECT key, head, payload, deadline_s FROM undelivered JOIN answers USING (number)"
                " WHERE deadline_s >= ? ORDER BY number",
                (self._clock(),),
            ).fetchall()
        except sqlite3.Error as error:
            self._failed(error)
            return []
        records = [self._read(RequestKey(key), *row) for key, *row in rows]
        return [record for record in records if record is not None]

    @property
    def waiting(self) -> int:
        """How many answers the broker does not have yet."""
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
        worked, cheap = self._indexes
        number = worked.numbers.get(key.digest)
        return cheap.numbers.get(key.digest) if number is None else number

    def _note_delivered(self, database: sqlite3.Connection) -> None:
        if self._delivered:
            database.executemany("DELETE FROM undelivered WHERE number = ?", self._delivered)
            self._delivered.clear()

    def _open(self, name: str) -> sqlite3.Connection:
        database = _connect(name)
        try:
            if not self._is_ours(database):
                database.close()
                if name != _MEMORY:
                    remove_database(self._path)
                database = _connect(name)
                database.executescript(_TABLES)
                database.execute("INSERT INTO meta VALUES (?, ?)", (_SCHEMA, self._boot))
            _check(database)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _read_index(self, database: sqlite3.Connection) -> None:
        self._indexes = [AnswerIndex() for _ in range(_CLASSES)]
        for number, key, cheap, size, client in database.execute(
            "SELECT number, key, cheap, bytes, client FROM answers ORDER BY number"
        ):
            self._indexes[cheap].add(key, number, client, size)
            self._next = max(self._next, number + 1)

    def _is_ours(self, database: sqlite3.Connection) -> bool:
        """Return whether the database is of this boot and has this version's tables."""
        if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return False
        return database.execute("SELECT schema, boot FROM meta").fetchall() == [(_SCHEMA, self._boot)]

    def _make_room(self, newest: int, *, cheap: bool) -> None:
        now_s = self._clock()
        if now_s - self._swept_s >= _SWEEP_INTERVAL_S:
            assert self._database is not None
            expired = self._database.execute(
                "SELECT number FROM answers WHERE deadline_s < ? LIMIT ?",
                (now_s - GRACE_S, _SWEEP_ROWS),
            ).fetchall()
            if len(expired) < _SWEEP_ROWS:
                self._swept_s = now_s
            for (number,) in expired:
                self._forget(number)
        index = self._indexes[cheap]
        most = MAX_REFUSALS if cheap else MAX_ANSWERS
        while len(index.numbers) > most or index.nbytes > MAX_ANSWER_BYTES:
            number = index.surplus(newest, in_bytes=len(index.numbers) <= most)
            self.dropped += self._forget(number) >= now_s

    def _forget(self, number: int) -> float:
        """Drop one, and return its deadline."""
        database = self._database
        assert database is not None
        # All rows are fetched: a statement that is not read to its end keeps the log from being reused.
        rows = database.execute(
            "DELETE FROM answers WHERE number = ? RETURNING key, cheap, deadline_s", (number,)
        ).fetchall()
        if not rows:
            raise sqlite3.DatabaseError(f"answer {number} is missing")
        [(key, cheap, deadline_s)] = rows
        database.execute("DELETE FROM undelivered WHERE number = ?", (number,))
        self._indexes[cheap].remove(key, number)
        until_s: float = deadline_s
        return until_s

    def _read(self, key: RequestKey, head: str, payload: bytes, deadline_s: float) -> AnswerRecord | None:
        """Return a remembered answer; None if its row is damaged, which SQLite does not notice."""
        try:
            return _record(key, head, payload, deadline_s)
        except (ValueError, TypeError) as error:
            self.dropped += 1
            self._rate_limited_log.error("a remembered answer cannot be read: %s", error)
            return None

    def _failed(self, error: sqlite3.Error) -> None:
        """Go on in memory, or without the answer that could not be read or written there."""
        assert self._database is not None
        with contextlib.suppress(sqlite3.Error):
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
        if self._in_memory:
            self.dropped += sum(len(index.numbers) for index in self._indexes)
            self._database.close()
            self._database = self._open(_MEMORY)
        else:
            self._use_memory()
        self._read_index(self._database)
        self._rate_limited_log.error("an answer is not stored: %s", error)

    def _use_memory(self) -> None:
        """Go on in memory, with the answers of the file if they can still be read."""
        file = self._database
        assert file is not None
        memory = self._open(_MEMORY)
        try:
            file.backup(memory)
            _check(memory)
        except sqlite3.Error:
            memory.close()
            memory = self._open(_MEMORY)
        with contextlib.suppress(sqlite3.Error):
            file.close()
        self._database, self._in_memory, self._tried_s = memory, True, self._clock()
        _log.error("answers are kept in memory: %s cannot be written", self._path)

    def _use_file(self) -> None:
        """Move the answers to the file, if it can be used again."""
        self._tried_s = self._clock()
        memory = self._database
        assert memory is not None
        file = None
        try:
            file = self._open_file()
            if file is None:
                return
            memory.backup(file)
        except (sqlite3.Error, InUseError) as error:
            self._rate_limited_log.error("answers stay in memory: %s", error)
            if file is not None:
                file.close()
            return
        memory.close()
        self._database, self._in_memory = file, False
        _log.warning("answers are kept in %s again", self._path)


def _connect(name: str) -> sqlite3.Connection:
    # Used by the event loop, and closed in a thread.
    database = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = OFF")
    database.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    return database


def _check(database: sqlite3.Connection) -> None:
    """Read every row that is needed at the start; raises sqlite3.Error if the database is damaged."""
    wrong = database.execute(
        "SELECT COUNT(*) FROM answers WHERE typeof(key) != 'blob' OR cheap NOT IN (0, 1)"
        " OR typeof(bytes) != 'integer' OR typeof(deadline_s) != 'real' OR typeof(client) != 'text'"
    ).fetchone()
    database.execute("SELECT COUNT(*) FROM undelivered").fetchone()
    if wrong != (0,):
        raise sqlite3.DatabaseError(f"{wrong[0]} rows are damaged")


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
            answer.server_timing,
            answer.session_step,
        ]
    )


def _record(key: RequestKey, head: str, payload: bytes, deadline_s: float) -> AnswerRecord:
    (topic, correlation, qos, trace, status, message, content_type, version, tensors, timing, step) = (
        json.loads(head)
    )
    return AnswerRecord(
        key,
        ReplyTo(
            topic,
            None if correlation is None else bytes.fromhex(correlation),
            qos,
            deadline_s,
            tuple((name, value) for name, value in trace),
        ),
        FinalAnswer(status, message, content_type, payload, version, tuple(tensors), timing, step),
    )
