"""Files into their places: whole or not at all, with the owner and the mode that each needs.

Promises: what stands at a path is the old file or the new one; a file with a secret is never readable for
others, not even while it is written. Leaves what goes where to `enroll`.
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
    """Whose the files are.

    Attributes
    ----------
    uid, gid
        As in chown(2); -1 leaves them as they come.
    """

    uid: int
    gid: int

    @classmethod
    def of_service(cls) -> Owner:
        """Return root with the service's group where that exists and we are root; else whoever runs this."""
        if os.geteuid() == 0:
            try:
                return cls(0, grp.getgrnam(SERVICE_GROUP).gr_gid)
            except KeyError:
                pass
        return cls(-1, -1)

    def mode(self, *, secret: bool) -> int:
        """Return the mode of a file: the service reads secrets through its group."""
        if not secret:
            return _PUBLIC
        return _SECRET_OF_ONE if self.gid == -1 else _SECRET


def require_writable(path: Path) -> None:
    """Return if a file can be written, as far as that can be told before; nobody is asked for nothing.

    Raises
    ------
    ConfigError
        If it cannot.
    """
    there = path
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
    except OSError as error:
        raise _refused(path, error) from error
    if not os.access(there, os.W_OK):
        raise _refused(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def make_folder(path: Path, owner: Owner) -> None:
    """Make a folder, and its parents, where there is none; one that is there stays as it is.

    Raises
    ------
    ConfigError
        If it cannot be made.
    """
    if path.is_dir():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        os.chown(path, owner.uid, owner.gid)
        path.chmod(0o700 if owner.gid == -1 else 0o750)
    except OSError as error:
        raise _refused(path, error) from error


def put(path: Path, data: bytes, owner: Owner, mode: int) -> None:
    """Write a file, durably and all at once.

    Raises
    ------
    ConfigError
        If it cannot be written; what was there is untouched.
    """
    try:
        with replacing(path, mode=0o600) as file:
            file.write(data)
            os.fchown(file.fileno(), owner.uid, owner.gid)
            os.fchmod(file.fileno(), mode)
    except OSError as error:
        raise _refused(path, error) from error


def free_name(folder: Path, name: str, data: bytes) -> Path:
    """Return where `data` can be put as `name` without touching another file: `key.pem`, or `key-2.pem`.

    A file that holds just these bytes already is its own place.
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
        hint="run it with sudo, or name a folder of your own with --config"
        if isinstance(error, PermissionError)
        else None,
    )
