"""A file of SQLite that one agent uses, and that is replaced when it cannot be used.

Promises: a damaged file costs only its content; a file of another agent that runs is left as it is.
Leaves to others: the tables, and going on in memory when there is no file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from agent.deploy.store.state_file import set_aside
from agent.errors import InUseError

_log = logging.getLogger(__name__)


def open_database(path: Path, connect: Callable[[str], sqlite3.Connection]) -> sqlite3.Connection | None:
    """Open a database; a file that cannot be used is removed or renamed, and a new one is made.

    Parameters
    ----------
    path
        The file.
    connect
        Opens a file by its name, and makes the tables if they are missing.

    Returns
    -------
    sqlite3.Connection or None
        None if the disk does not allow a new file.

    Raises
    ------
    InUseError
        If another agent has the file open.
    """
    for _ in range(2):
        try:
            return connect(str(path))
        except sqlite3.Error as error:
            number = getattr(error, "sqlite_errorcode", None)
            if number in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise InUseError(
                    f"{path} is in use by another agent",
                    hint="stop the other agent, or give this one its own state directory",
                ) from error
            _log.warning("%s cannot be used: %s", path, error)
            if not _clear_away(path, number):
                return None
    return None


def remove_database(path: Path) -> None:
    """Delete a database and its logs; a missing file is no error.

    Raises
    ------
    OSError
        If the disk refuses.
    """
    for file in _files(path):
        file.unlink(missing_ok=True)


def _files(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]


def _clear_away(path: Path, number: int | None) -> bool:
    """Remove a database that cannot be opened; return whether another attempt may succeed.

    A damaged file is deleted, and a file that this user may not use is renamed. If the disk refuses, nothing
    is changed.
    """
    # Extended codes have the primary one in their lowest byte.
    if number is None or number & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        for file in _files(path):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        return True
    usable = path.is_file() and os.access(path, os.R_OK | os.W_OK)
    if usable or not os.path.lexists(path) or not os.access(path.parent, os.W_OK):
        return False
    set_aside(path)
    return True
