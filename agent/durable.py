"""Replace a file so that a crash or a power cut leaves the old or the new content, and nothing in between.

The order is: write a temporary file in the same folder, fsync it, rename it, fsync the folder.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from agent.errors import DiskError, NoSpaceError

# A process that is killed leaves `.*.tmp` behind; the store removes its own at the next start.
TEMPORARY_SUFFIX: Final = ".tmp"
_log = logging.getLogger(__name__)

# One block of a file system.
_TRIAL_BYTES: Final = 4096
# What a full disk, a full quota and a file-size limit report.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o666, follow: bool = True) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path`, durably, when the block ends.

    If the block raises, `path` holds what it held before and no temporary file is left behind. If only the
    folder cannot be synced at the end, the new file stands and the failure is logged.

    Parameters
    ----------
    mode
        Permission bits, subject to the umask; the block may change them with `os.fchmod`.
    follow
        Whether the folder may be a link. Root must not follow one that another user can make.

    Raises
    ------
    OSError
        If the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}").name
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    folder = os.open(path.parent, flags if follow else flags | os.O_NOFOLLOW)
    try:
        writing = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, writing, mode, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        try:
            os.fsync(folder)
        except OSError as error:
            # Not raised: the new file stands, and the caller must not believe that the old one does.
            _log.error("%s is written, but a power cut may undo that: %s", path, error.strerror)
    finally:
        os.close(folder)


def try_out(folder: Path) -> None:
    """Write a small file into a folder, durably, and remove it.

    Raises
    ------
    OSError
        If the file system refuses.
    """
    temporary = folder / f".trial.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, bytes(_TRIAL_BYTES)) < _TRIAL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder durable; without this a power cut can undo them.

    Raises
    ------
    OSError
        If the file system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes, *, mode: int = 0o640) -> None:
    """Replace `path` by `data`.

    Raises
    ------
    NoSpaceError
        If the disk is full; `path` holds what it held before.
    DiskError
        If the file system refuses for another reason; `path` holds what it held before.
    """
    try:
        with replacing(path, mode=mode) as file:
            view = memoryview(data)
            while view:
                view = view[os.write(file.fileno(), view) :]
    except OSError as error:
        raise store_error(f"writing {path.name}", error) from error


def store_error(doing: str, error: OSError) -> DiskError:
    """Turn a file system error into a `DiskError`.

    Parameters
    ----------
    doing
        What failed, as in "writing active.json".
    error
        What the system call raised.
    """
    if error.errno in _FULL:
        return NoSpaceError(f"{doing}: {error.strerror}", hint="free some space in the state directory")
    return DiskError(f"{doing}: {error.strerror or error}")
