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
from agent.wire.blocks import MAX_BLOCK_BYTES, Want
from builder.errors import PackageError


class Offer:
    """A bundle that agents may pull.

    `path`: the file. It stays open, so that all blocks are of one version of it.
    `sent`: bytes sent so far; blocks that were sent twice count twice.
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

    def blocks(self, request: bytes, most_bytes: int = MAX_BLOCK_BYTES) -> Iterator[tuple[int, bytes]]:
        """Return the blocks that a want document asks for, as offset and bytes; none if it is not one.

        If the blocks would have more than `most_bytes`, only the first comes, and as short: from it, the
        agent learns which blocks to ask for.

        Raises `PackageError` if the file has become shorter since it was opened.
        """
        try:
            want = Want.from_bytes(request)
        except BundleError:
            return
        block_bytes = min(want.block_bytes, most_bytes)
        count = 1 if block_bytes < want.block_bytes else want.count
        end = min(want.offset + count * block_bytes, self.size)
        for start in range(want.offset, end, block_bytes):
            data = os.pread(self._descriptor, min(block_bytes, self.size - start), start)
            if not data:
                raise PackageError(
                    f"{self._path} became shorter while it was sent",
                    hint="do not write to the bundle while it is sent: deploy it again",
                )
            self.sent += len(data)
            yield start, data
