"""The version of the state directory's layout: the file `format` in it.

Promises: an agent never uses or changes a directory that a newer agent has written. A damaged file is logged.
The .deb of an older agent is not installed over it (packaging/files/preinst reads the same file).
Leaves to others: what the versions mean; so far there is one.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

from agent.deploy.store.state_file import set_aside
from agent.durable import write_durably
from agent.errors import StoreError
from agent.reading import open_at_once

# Incremented when an older agent could not read, or would damage, what this one writes.
STATE_FORMAT: Final = 1
FORMAT_FILE: Final = "format"
_MAX_BYTES: Final = 16

_log = logging.getLogger(__name__)


def check(root: Path) -> None:
    """Check that this agent may use the state directory `root`.

    Raises
    ------
    StoreError
        If a newer agent has written it.
    """
    path = root / FORMAT_FILE
    try:
        with os.fdopen(open_at_once(path), "rb") as file:
            raw = (file.read(_MAX_BYTES) or b"").strip()
    except (FileNotFoundError, NotADirectoryError):
        return  # a new directory, or one of an agent before this file existed: version 1
    except OSError as error:
        _log.error("cannot read %s: %s", path, error.strerror)
        return  # the directory itself is readable, or its other files tell
    if not raw.isdigit():
        # A newer agent writes a number too, so this is damage.
        _log.error("%s is damaged: expected a number, got %r", path, raw)
        return
    if int(raw) > STATE_FORMAT:
        raise StoreError(
            f"{root} was written by a newer agent: expected format {STATE_FORMAT} at most, "
            f"got {raw.decode('ascii', 'replace')!r}",
            hint="install the newer edge-agent again, or restore a backup of the older state",
        )


def mark(root: Path) -> None:
    """Record the version in the state directory `root`."""
    path, version = root / FORMAT_FILE, f"{STATE_FORMAT}\n".encode()
    try:
        if not path.is_file() and os.path.lexists(path):
            set_aside(path)
        elif path.read_bytes() == version:
            return
    except OSError:
        pass
    write_durably(path, version)
