"""The offering side of the block protocol: an agent asks for blocks, a file provides them.

Promises: a request is read strictly and within limits (`agent.wire.blocks`), so a client that may publish
requests cannot make this side send more than one window at a time. Only the file's bytes are sent.
Leaves to others: the connection. docs/deployment.md describes the protocol and the agent's side.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from agent.errors import BundleError
from agent.wire.blocks import Want
from builder.errors import PackageError


class Offer:
    """A bundle that agents may pull.

    Parameters
    ----------
    path
        The file. It stays open, so that all blocks are of one version of it.

    Attributes
    ----------
    size
        Bytes of the file.
    sent
        Bytes sent so far; blocks that were sent twice count twice.
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

    def blocks(self, request: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the blocks that a want document asks for, as offset and bytes; none if it is not one.

        Raises
        ------
        PackageError
            If the file has become shorter since it was opened.
        """
        try:
            want = Want.from_bytes(request)
        except BundleError:
            return
        end = min(want.offset + want.count * want.block_bytes, self.size)
        for start in range(want.offset, end, want.block_bytes):
            data = os.pread(self._descriptor, min(want.block_bytes, self.size - start), start)
            if not data:
                raise PackageError(f"{self._path} became shorter while it was sent")
            self.sent += len(data)
            yield start, data
