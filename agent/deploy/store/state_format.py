"""Which version of the state directory this agent reads and writes: the file `format` in it.

Promises: an agent never works on a directory that a newer one has written, and touches nothing there; the
package of an older agent is not installed over it (packaging/files/preinst reads the same file).
Leaves to others: what the versions mean; there has been one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agent.durable import store_error, write_durably
from agent.errors import StoreError

# Raised when an older agent could not read, or would damage, what this one writes.
STATE_FORMAT: Final = 1
FORMAT_FILE: Final = "format"
_MAX_BYTES: Final = 16


def check(root: Path) -> None:
    """Return if this agent may use the state directory `root`.

    Raises
    ------
    StoreError
        If a newer agent has written it, and this one could misread it.
    """
    path = root / FORMAT_FILE
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES).strip()
    except (FileNotFoundError, NotADirectoryError):
        return  # before the first agent, or of one that had no such file: both are version 1
    except OSError as error:
        raise store_error(f"reading {path}", error) from error
    if not raw.isdigit() or int(raw) > STATE_FORMAT:
        raise StoreError(
            f"{root} was written by a newer agent: its format is {raw.decode('ascii', 'replace')!r}, "
            f"this one knows up to {STATE_FORMAT}",
            hint="install the newer edge-agent again, or restore a backup of the older one's state",
        )


def mark(root: Path) -> None:
    """Note in the state directory `root`, durably, which version it is.

    Raises
    ------
    StoreError
        If it could not be written.
    """
    path, version = root / FORMAT_FILE, f"{STATE_FORMAT}\n".encode()
    try:
        if path.read_bytes() == version:
            return
    except OSError:
        pass
    write_durably(path, version)
