"""A small JSON document that survives a crash, a full disk, and a flipped bit.

Promises: a reader sees all of the old document or all of the new one, whenever the writer was killed. A
damaged document is recognised by its digest and renamed, and its mirror is used instead.
Leaves to others: what the document means, and when it is written.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from agent.durable import write_durably
from agent.errors import StoreError
from agent.reading import open_at_once

# Far above the largest document (64 models, 64 jobs), and still fast to parse on a small board.
MAX_STATE_BYTES: Final = 4 * 1024 * 1024
# A save takes milliseconds, and seconds on a card that collects its garbage; then the disk does not respond.
SAVE_LIMIT_S: Final = 20.0

# How many damaged files are kept under one name: enough to inspect, too few to fill a disk.
_MAX_ASIDE: Final = 4

Checkpoint = Callable[[str], None]
"""Called with the name of a step that has just become durable; tests kill the process there."""

_log = logging.getLogger(__name__)


def no_checkpoint(_name: str) -> None:
    """Do nothing; the default checkpoint."""


class StateFile:
    """One JSON document at `path`, with a mirror beside it when it must not be lost.

    The mirror of a `mirrored` document, one that cannot be reconstructed, is `<path>.mirror`. A damaged file
    is renamed to `<path>.corrupt`, so that a person can examine it. `checkpoint` is called after each durable
    step, for fault injection.
    """

    def __init__(self, path: Path, *, mirrored: bool, checkpoint: Checkpoint = no_checkpoint) -> None:
        self._path = path
        self._mirror = mirror_of(path) if mirrored else None
        self._checkpoint = checkpoint
        self._latest = b""

    def load(self) -> object | None:
        """Return the newest undamaged document, or None."""
        documents = self.load_all()
        return documents[0] if documents else None

    def load_all(self) -> list[object]:
        """Return every undamaged copy, newest first; damaged files are renamed."""
        copies = (self._path,) if self._mirror is None else (self._path, self._mirror)
        return [document for copy in copies for document in _read(copy)]

    @property
    def exists(self) -> bool:
        """Whether the document is on disk, damaged or not."""
        return self._path.exists()

    def save(self, document: object) -> None:
        """Replace the document, and then its mirror; if that cannot be written, it is only logged.

        A call that hangs on the disk may end after its caller has given up, and after a later call. The
        document of the later call stays.
        """
        body = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        digest = hashlib.sha256(body.encode()).hexdigest()
        raw = f'{{"sha256":"{digest}","body":{body}}}\n'.encode()
        if len(raw) > MAX_STATE_BYTES:
            raise StoreError(f"{self._path.name}: expected at most {MAX_STATE_BYTES} bytes, got {len(raw)}")
        self._latest = raw
        self._write(raw)
        # No lock: a call that never returns must not hold up the others.
        while raw is not self._latest:
            raw = self._latest
            self._write(raw)

    def _write(self, raw: bytes) -> None:
        write_durably(self._path, raw)
        self._checkpoint(f"{self._path.name}:written")
        if self._mirror is None:
            return
        try:
            write_durably(self._mirror, raw)
        except StoreError as error:
            _log.warning("cannot write the mirror of %s: %s", self._path.name, error)
        self._checkpoint(f"{self._path.name}:mirrored")


def mirror_of(path: Path) -> Path:
    """Return the path of a document's mirror."""
    return path.with_name(path.name + ".mirror")


def peek(path: Path) -> object | None:
    """Return the document at `path` without renaming anything; None if it is missing or damaged."""
    try:
        with os.fdopen(open_at_once(path), "rb") as file:
            return _decode(file.read(MAX_STATE_BYTES + 1))
    except OSError:
        return None


def _read(path: Path) -> list[object]:
    """Return `[document]`, or `[]` if it is missing or damaged; rename a damaged file."""
    try:
        with os.fdopen(open_at_once(path), "rb") as file:
            raw = file.read(MAX_STATE_BYTES + 1) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except FileNotFoundError:
        return []
    except IsADirectoryError:
        raw = b""
    except OSError as error:
        _log.error("cannot read %s: %s", path, error)
        return []
    document = _decode(raw)
    if document is not None:
        return [document]
    _log.error("%s is damaged", path)
    set_aside(path)
    return []


def set_aside(path: Path) -> None:
    """Rename a file that is damaged or in the way to `<path>.corrupt`; a failure is logged."""
    for number in range(_MAX_ASIDE):
        aside = path.with_name(f"{path.name}.corrupt{number or ''}")
        try:
            # A folder cannot replace a file, nor a file a folder; then the next name is tried.
            path.replace(aside)
        except (FileExistsError, IsADirectoryError, NotADirectoryError):
            continue
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                continue
            _log.error("cannot rename %s: %s", path, error)
            return
        _log.error("%s is renamed to %s", path, aside.name)
        return
    _log.error("cannot rename %s: every name is taken", path)


def _decode(raw: bytes) -> object | None:
    if len(raw) > MAX_STATE_BYTES:
        return None
    try:
        envelope = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(envelope, dict) or envelope.keys() != {"sha256", "body"} or envelope["body"] is None:
        return None
    body = json.dumps(envelope["body"], sort_keys=True, separators=(",", ":"))
    if hashlib.sha256(body.encode()).hexdigest() != envelope["sha256"]:
        return None
    document: object = envelope["body"]
    return document
