"""The file of the outbox: one retained message for each topic, in the order in which they were published.

Promises: a change is in the file as a whole or not at all. A damaged file is replaced by an empty one.
Every call blocks: make it in a thread, one at a time.
Leaves to others: which messages there are, and what to do without a file.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.deploy.store.database_file import open_database
from agent.errors import DiskError

FILE: Final = "outbox.db"
_SCHEMA: Final = 1
_TABLE: Final = """
CREATE TABLE outbox (
  number INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT UNIQUE, payload BLOB NOT NULL, time_s REAL NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One message; `time_s` counts from the first one, without the times in which no agent ran."""

    topic: str
    payload: bytes
    time_s: float


class OutboxFile:
    """An open file, by the database in it."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._abandoned = False

    @classmethod
    def open(cls, folder: Path) -> OutboxFile:
        """Open the file in a folder, which is replaced if it cannot be used.

        Raises InUseError if another agent has it open, and DiskError if the disk does not allow a new file.
        """
        path = folder / FILE
        database = open_database(path, _open)
        if database is None:
            raise DiskError(f"{path} cannot be used")
        return cls(database)

    def read(self) -> list[OutboxRow]:
        """Return all messages, the oldest first."""
        try:
            rows = self._database.execute("SELECT topic, payload, time_s FROM outbox ORDER BY number")
            return [OutboxRow(*row) for row in rows.fetchall()]
        except sqlite3.Error as error:
            raise DiskError(f"reading {FILE}: {error}") from error

    def write(self, gone: Iterable[str] | None, rows: Iterable[OutboxRow]) -> None:
        """Delete the messages on the topics `gone`, all if it is None, and add `rows`.

        If the file cannot be written (DiskError), nothing is changed, and it is closed.
        """
        try:
            with self._database:
                self._database.execute("BEGIN IMMEDIATE")
                if gone is None:
                    self._database.execute("DELETE FROM outbox")
                else:
                    self._database.executemany(
                        "DELETE FROM outbox WHERE topic = ?", [(topic,) for topic in gone]
                    )
                self._database.executemany(
                    "INSERT INTO outbox (topic, payload, time_s) VALUES (?, ?, ?)",
                    [(row.topic, row.payload, row.time_s) for row in rows],
                )
        except sqlite3.Error as error:
            self._abandoned = True
            raise DiskError(f"writing {FILE}: {error}") from error
        finally:
            if self._abandoned:
                self.close()

    def abandon(self) -> None:
        """Let the call of `write` that does not return close the file when it does."""
        self._abandoned = True

    def close(self) -> None:
        """Close the file; its messages stay."""
        with contextlib.suppress(sqlite3.Error):
            self._database.close()


def _open(name: str) -> sqlite3.Connection:
    # Each call is in another thread, and they follow each other.
    database = sqlite3.connect(name, isolation_level=None, check_same_thread=False)
    try:
        _prepare(database)
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
