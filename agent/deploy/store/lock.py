"""The lock of a state directory, which one agent holds while it runs.

Promises: the lock ends with the process, however that ends. A folder that was replaced is locked again.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from agent.durable import store_error
from agent.errors import InUseError

_log = logging.getLogger(__name__)


class Lock:
    """The lock of the directory `root`: a file in it, or the folder if no file can be opened."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path = root / "lock"
        self._held: int | None = None

    def take(self) -> bool:
        """Take the lock, and return True; False if this process has it already, or nothing can be opened.

        Raises
        ------
        InUseError
            If another agent has it.
        """
        descriptor = self._open()
        if descriptor is None:
            return False
        if self._held is not None:
            if os.path.samestat(os.fstat(descriptor), os.fstat(self._held)):
                os.close(descriptor)
                return False
            self.release()  # of a folder that is gone
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise InUseError(
                f"{self._root} is in use by another agent",
                hint="stop that agent, or give this one its own state_dir",
            ) from error
        except OSError as error:  # a network file system without locks
            _log.error("%s", store_error(f"locking {self._path}", error))
        self._held = descriptor
        return True

    def taken_by_another(self) -> bool:
        """Return whether another process has the lock, without creating anything."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise store_error("opening the agent's lock", error) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def release(self) -> None:
        """Give the lock up, if this process has it."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _open(self) -> int | None:
        for path, flags in (
            (self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW),
            (self._path, os.O_RDONLY | os.O_NOFOLLOW),
            (self._root, os.O_RDONLY | os.O_DIRECTORY),
        ):
            try:
                return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o640)
            except OSError as error:
                level = logging.ERROR if path is self._root else logging.INFO
                _log.log(level, "%s cannot be opened: %s", path, error.strerror)
        return None
