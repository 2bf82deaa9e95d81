"""Writing files whole or not at all, with the right owner and mode.

Promises: a path holds either the old file or the new one; a file with a secret is never readable by others,
not even while it is being written. Leaves it to `enroll` which file goes where.
"""

from __future__ import annotations

import errno
import grp
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.durable import replacing
from agent.errors import ConfigError

SERVICE_GROUP: Final = "edge-agent"
_PUBLIC: Final = 0o644
_SECRET: Final = 0o640
_SECRET_OF_ONE: Final = 0o600


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of written files, as in chown(2); -1 leaves the owner as created."""

    uid: int
    gid: int

    @classmethod
    def of_service(cls) -> Owner:
        """Return root and the service's group if we are root and that group exists, else the current user."""
        if os.geteuid() == 0:
            try:
                return cls(0, grp.getgrnam(SERVICE_GROUP).gr_gid)
            except KeyError:
                pass
        return cls(-1, -1)

    def mode(self, *, secret: bool) -> int:
        """Return the mode for a file; the service reads secrets through its group."""
        if not secret:
            return _PUBLIC
        return _SECRET_OF_ONE if self.gid == -1 else _SECRET


def require_writable(path: Path) -> None:
    """Check that a file can be written, before the user is asked any questions; raises ConfigError if not."""
    existing = path
    try:
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
    except OSError as error:
        raise _refused(path, error) from error
    if not os.access(existing, os.W_OK):
        raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def make_folder(path: Path, owner: Owner) -> None:
    """Create a folder and its parents, or raise ConfigError; an existing folder is not changed."""
    if path.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        os.chown(path, owner.uid, owner.gid)
        path.chmod(0o700 if owner.gid == -1 else 0o750)
    except OSError as error:
        raise _refused(path, error) from error


def write_file(path: Path, data: bytes, owner: Owner, mode: int) -> None:
    """Replace a file in one step, durably; if that fails (ConfigError), the old file is unchanged."""
    try:
        with replacing(path, mode=0o600) as file:
            file.write(data)
            os.fchown(file.fileno(), owner.uid, owner.gid)
            os.fchmod(file.fileno(), mode)
    except OSError as error:
        raise _refused(path, error) from error


def free_name(folder: Path, name: str, data: bytes) -> Path:
    """Return a path for `data` that overwrites no other file: `key.pem`, or `key-2.pem`, and so on.

    A file that already holds exactly these bytes is returned as it is.
    """
    stem, suffix = Path(name).stem, Path(name).suffix
    number = 1
    while True:
        path = folder / (name if number == 1 else f"{stem}-{number}{suffix}")
        try:
            if path.read_bytes() == data:
                return path
        except FileNotFoundError:
            return path
        except OSError as error:
            raise _refused(path, error) from error
        number += 1


def _refused(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {path}: {error.strerror}",
        hint="run it with sudo, or give a folder of your own with --config"
        if isinstance(error, PermissionError)
        else "make room there, or give another folder with --config",
    )
