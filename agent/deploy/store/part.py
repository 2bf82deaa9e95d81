"""A bundle that is on its way: the file that a transfer appends to, and goes on from after a cut.

Promises: the file is only ever appended to or emptied, so its length is where a transfer goes on; it never
grows beyond the announced size; a full disk is told as such, and nothing partial is ever mistaken for a
bundle.
Leaves to others: whether the bytes are the right ones (the digest, and then the signature, say that).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from agent.durable import store_error, write_durably
from agent.errors import EndlessDataError, StoreError

_CHUNK_BYTES: Final = 1024 * 1024
# A URL of at most 2048 characters, an entity tag, and the JSON around them.
_ORIGIN_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class UrlVersion:
    """Which version of which URL the bytes of a part came from."""

    url: str
    etag: str


class Part:
    """The beginning of a bundle of `size` bytes, open for appending.

    Parameters
    ----------
    path
        The file; made if it is not there. Beside it, `<path>.origin` may say where the bytes came from.
    size
        The announced size: the file never grows beyond it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._origin = path.with_name(path.name + ".origin")
        self._size = size
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
            self._written = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise store_error(f"opening {path.name}", error) from error
        if self._written > size:
            self.restart()

    def __enter__(self) -> Part:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def written(self) -> int:
        """Bytes that are there."""
        return self._written

    @property
    def size(self) -> int:
        """Bytes that there will be."""
        return self._size

    def append(self, data: bytes | memoryview) -> None:
        """Write `data` at the end.

        Raises
        ------
        EndlessDataError
            If more would be there than was announced; nothing is written.
        NoSpaceError, StoreError
            If the disk is full, or failed. What was whole before is kept, for a later attempt.
        """
        if self._written + len(data) > self._size:
            raise EndlessDataError(f"more than the announced {self._size} bytes came")
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._descriptor, view, self._written)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise store_error(f"writing {self._path.name} at {self._written}", error) from error

    def restart(self) -> None:
        """Forget what is there."""
        try:
            self._origin.unlink(missing_ok=True)
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise store_error(f"emptying {self._path.name}", error) from error
        self._written = 0

    def origin(self) -> UrlVersion | None:
        """Return where the bytes came from, if that was noted."""
        try:
            with self._origin.open("rb") as file:
                raw = file.read(_ORIGIN_BYTES + 1)
            fields = json.loads(raw)
            return UrlVersion(url=str(fields["url"]), etag=str(fields["etag"]))
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None  # not noted, or damaged: the transfer goes on without, and the digest decides

    def set_origin(self, origin: UrlVersion | None) -> None:
        """Note where the bytes come from; None forgets it."""
        if origin is None:
            self._origin.unlink(missing_ok=True)
        else:
            write_durably(self._origin, json.dumps({"url": origin.url, "etag": origin.etag}).encode())

    def sync(self) -> None:
        """Make what was written durable."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise store_error(f"writing {self._path.name}", error) from error

    def digest(self) -> str:
        """Return `sha256:<hex>` of what is there. Reads the file: call it in a thread."""
        sha256 = hashlib.sha256()
        offset = 0
        try:
            while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset):
                sha256.update(chunk)
                offset += len(chunk)
        except OSError as error:
            raise StoreError(f"reading {self._path.name}: {error.strerror}") from error
        return f"sha256:{sha256.hexdigest()}"

    def close(self) -> None:
        """Close the file; what is there stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
