"""The SHA-256 of a payload, taken without blocking the event loop.

A processor without instructions for SHA-256, such as that of a Raspberry Pi 3 or 4, takes up to 15 ms for a
MiB, so a second for the largest payload. A large payload is therefore read in slices, and the event loop
turns between them. This needs no thread, which could not always be started.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

# How many bytes are hashed before the event loop gets its turn.
SLICE_BYTES: Final = 1 << 20
# When this much waits, the next request is refused: its payload would take memory and time.
MAX_WAITING_BYTES: Final = 64 << 20


class PayloadDigests:
    """Takes the digests of large payloads, one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        # Of the payloads that wait for their digest.
        self.waiting_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Return whether one more payload of this size may wait; the first always may."""
        return not self.waiting_bytes or self.waiting_bytes + nbytes <= MAX_WAITING_BYTES

    async def of(self, payload: bytes) -> bytes:
        """Return the digest of a payload."""
        self.waiting_bytes += len(payload)
        try:
            async with self._turn:
                whole = hashlib.sha256()
                view = memoryview(payload)
                for at in range(0, len(view), SLICE_BYTES):
                    whole.update(view[at : at + SLICE_BYTES])
                    await asyncio.sleep(0)
                return whole.digest()
        finally:
            self.waiting_bytes -= len(payload)
