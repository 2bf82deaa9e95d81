"""The offering side of the block protocol: an agent asks for blocks, a file answers.

Promises: a request is read strictly and within limits, so that whoever may publish there cannot make this
side send more than one window at a time; what is sent is the file's bytes and nothing else.
Leaves to others: the connection. The agent's side, and the protocol, are described in docs/deployment.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final

from builder.errors import PackageError

MAX_WANT_BYTES: Final = 1024
# 64 MiB at once is far more than any agent holds; a request for more is not from one.
MAX_BLOCK_BYTES: Final = 1024 * 1024
MAX_COUNT: Final = 64
_KEYS: Final = {"offset", "count", "block_bytes", "seq"}


class Offer:
    """A bundle that agents may pull.

    Parameters
    ----------
    path
        The file. It stays open, so that what is sent is one version of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size
        self.sent = 0

    def __enter__(self) -> Offer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def answer(self, want: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the blocks that a request asks for, as offset and bytes; none if it makes no sense."""
        try:
            fields = json.loads(want) if len(want) <= MAX_WANT_BYTES else None
        except (ValueError, RecursionError):
            return
        if not isinstance(fields, dict) or fields.keys() != _KEYS:
            return
        offset, count, block_bytes = fields["offset"], fields["count"], fields["block_bytes"]
        if any(type(value) is not int for value in fields.values()):
            return
        if not (0 <= offset < self.size and 1 <= count <= MAX_COUNT and 1 <= block_bytes <= MAX_BLOCK_BYTES):
            return
        for start in range(offset, min(offset + count * block_bytes, self.size), block_bytes):
            data = os.pread(self._descriptor, min(block_bytes, self.size - start), start)
            if not data:
                raise PackageError(f"{self._path} became shorter while it was sent")
            self.sent += len(data)
            yield start, data
