"""An unfinished download: the file that a transfer appends to, and resumes from after an interruption.

Promises: the file is only appended to or emptied, so its length is where a transfer resumes. It never grows
beyond the announced size. A full disk is reported as such, and a partial file is never mistaken for a bundle.
Leaves to others: whether the bytes are the right ones (the digest and then the signature decide).
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from agent.bundle.names import format_digest
from agent.durable import store_error, write_durably
from agent.errors import EndlessDataError, StoreError

_CHUNK_BYTES: Final = 1024 * 1024
# A URL of at most 2048 characters, an entity tag, and the JSON around them.
_MAX_ORIGIN_BYTES: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class UrlVersion:
    """The version of a URL's file, by its strong entity tag in quotes (RFC 9110, 8.8.3)."""

    url: str
    etag: str


class Part:
    """A download of `size` bytes, open for appending.

    Beside the file, `<path>.origin` may record where the bytes came from.
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
        """Number of downloaded bytes."""
        return self._written

    @property
    def size(self) -> int:
        """The announced number of bytes."""
        return self._size

    def append(self, data: bytes | memoryview) -> None:
        """Write `data` at the end, unless that is beyond the announced size (EndlessDataError).

        If the disk is full, or failed, the bytes before are kept for a later attempt.
        """
        if self._written + len(data) > self._size:
            raise EndlessDataError(f"expected {self._size} bytes, got more")
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._descriptor, view, self._written)
                self._written += count
                view = view[count:]
        except OSError as error:
            raise store_error(f"writing {self._path.name} at {self._written}", error) from error

    def restart(self) -> None:
        """Empty the file, and forget where its bytes came from."""
        try:
            self._origin.unlink(missing_ok=True)
            os.ftruncate(self._descriptor, 0)
        except OSError as error:
            raise store_error(f"emptying {self._path.name}", error) from error
        self._written = 0

    def origin(self) -> UrlVersion | None:
        """Return where the bytes came from; None if that is not recorded."""
        try:
            with self._origin.open("rb") as file:
                raw = file.read(_MAX_ORIGIN_BYTES + 1)
            fields = json.loads(raw)
            return UrlVersion(url=str(fields["url"]), etag=str(fields["etag"]))
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None  # not recorded, or damaged: the transfer resumes without it, and the digest decides

    def set_origin(self, origin: UrlVersion | None) -> None:
        """Record where the bytes come from; None removes the record."""
        if origin is None:
            self._origin.unlink(missing_ok=True)
        else:
            write_durably(self._origin, json.dumps({"url": origin.url, "etag": origin.etag}).encode())

    def sync(self) -> None:
        """Make the appended bytes durable."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise store_error(f"writing {self._path.name}", error) from error

    def digest(self) -> str:
        """Return `sha256:<hex>` of the file. This reads all of it: call it in a thread."""
        sha256 = hashlib.sha256()
        offset = 0
        try:
            while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset):
                sha256.update(chunk)
                offset += len(chunk)
        except OSError as error:
            raise StoreError(f"reading {self._path.name}: {error.strerror}") from error
        return format_digest(sha256.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
