"""The block protocol as a state machine without I/O: pull a bundle in blocks.

Promises: bytes and times in, decisions out. Blocks are written in order, so the length of the file on disk
is all that a resumed pull needs to know. A block that was not requested is dropped, nothing beyond the
announced size is written, and at most one window of blocks is held in memory.
Leaves to others: the broker, the file, the clock, and the digest at the end. Only that digest makes the bytes
trustworthy: a client that may publish to the block topics can spoil a transfer, but not forge one.

The messages, at QoS 0 because the protocol repeats its requests itself:

================================  ===============================================================
`bundles/<hex digest>/want`       from the agent, `agent.wire.blocks.Want`
`bundles/<hex digest>/block/<n>`  from the offering side, up to `block_bytes` bytes from offset n
================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.errors import EndlessDataError
from agent.wire.blocks import MAX_COUNT, MIN_BLOCK_BYTES, Want

# Measured on loopback (docs/decisions/0004): between 64 KiB and 1 MiB the difference is below the noise,
# and on a slow link a lost small block costs less time.
BLOCK_BYTES: Final = 64 * 1024
# Blocks requested and not yet received: 4 MiB. A pull holds as much, and its owner what is being written.
WINDOW_BLOCKS: Final = MAX_COUNT
# A request is repeated after this long without a block; the interval doubles up to the longest.
SILENCE_S: Final = 2.0
LONGEST_SILENCE_S: Final = 30.0
# Where a broker does not state the largest packet, sizes down to this are tried.
LEAST_GUESS_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Write:
    """Append `data` to the file, which ends at `offset`."""

    offset: int
    data: bytes


class BlockPull:
    """The state of one download, of which `have` of `size` bytes are on disk.

    The window starts at two blocks, grows by one with each block that arrives, and is halved when none does.
    So requests of a slow link do not pile up in the broker, and a fast link is busy after a few blocks. A
    block that is too short says what the other side can send: from then on, blocks are as short.

    With `guesses` the largest packet is unknown: until the first block arrives, each repeated request is for
    smaller ones, and after the smallest for the largest again. A request is repeated after `silence_s`
    without a block, and later after at most `longest_silence_s`. Each `now` is a monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        size: int,
        have: int,
        now: float,
        block_bytes: int = BLOCK_BYTES,
        window_blocks: int = WINDOW_BLOCKS,
        guesses: bool = False,
        silence_s: float = SILENCE_S,
        longest_silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        if not 0 <= have <= size or block_bytes < 1 or window_blocks < 1:
            raise ValueError(f"cannot pull {size} bytes in blocks of {block_bytes} with {have} on disk")
        self._size = size
        self._written = have  # the length of the file
        self._requested = have  # everything before this offset has been requested
        self._early: dict[int, bytes] = {}  # blocks that arrived before their predecessor
        self._block_bytes = self._largest_bytes = block_bytes
        self._guesses = guesses
        self._most_blocks = window_blocks
        self._window_blocks = min(2, window_blocks)
        self._first_silence_s = silence_s
        self._silence_s = silence_s
        self._longest_silence_s = longest_silence_s
        self._heard_at = now
        self._requested_at = now
        self._seq = 0

    @property
    def written(self) -> int:
        """Length of the file in bytes."""
        return self._written

    @property
    def complete(self) -> bool:
        """Whether every byte has been written."""
        return self._written == self._size

    @property
    def ask_again_at(self) -> float:
        """When `tick` has something to do next."""
        return max(self._requested_at, self._heard_at) + self._silence_s

    @property
    def heard_at(self) -> float:
        """When the last useful block arrived."""
        return self._heard_at

    def start(self, now: float) -> Iterator[Want]:
        """Request the first window."""
        self._requested_at = now
        yield from self._ask()

    def expects(self, offset: int) -> bool:
        """Return whether a block from `offset` on may have been requested, and is not there yet."""
        reach = min(self._written + self._most_blocks * self._block_bytes, self._size)
        inside = self._written <= offset < reach and not (offset - self._written) % self._block_bytes
        return inside and offset not in self._early

    def block(self, offset: int, data: bytes, now: float) -> Iterator[Write | Want]:
        """Take a block; return what to write and what to request.

        A block that is longer than requested raises EndlessDataError.
        """
        if not self.expects(offset):
            return
        expected = min(self._block_bytes, self._size - offset)
        if len(data) > expected:
            raise EndlessDataError(f"expected a block of {expected} bytes at {offset}, got {len(data)}")
        if len(data) < expected:
            # The other side can send no more; one that is too short counts as lost, and is requested later.
            if len(data) >= MIN_BLOCK_BYTES:
                self._heard_at = now
                self.limit(len(data))
                yield from self._repeat(now)
            return
        self._guesses = False
        # On a link that takes a second for a block, do not repeat a request after two.
        self._silence_s = min(max(self._first_silence_s, 4 * (now - self._heard_at)), self._longest_silence_s)
        self._heard_at = now
        self._window_blocks = min(self._window_blocks + 1, self._most_blocks)
        self._early[offset] = data
        while (ready := self._early.pop(self._written, None)) is not None:
            yield Write(self._written, ready)
            self._written += len(ready)
        self._requested = max(self._requested, self._written)
        # Requesting when half a window is left keeps the link busy without one request for each block.
        if 2 * (self._requested - self._written) <= self._window_blocks * self._block_bytes:
            yield from self._ask()

    def tick(self, now: float) -> Iterator[Want]:
        """Request the missing blocks again if none has arrived for long enough."""
        if now < self.ask_again_at or self.complete:
            return
        self._silence_s = min(2 * self._silence_s, self._longest_silence_s)
        self._window_blocks = max(1, self._window_blocks // 2)
        if self._guesses:
            smaller = self._block_bytes // 4
            self._resize(smaller if smaller >= LEAST_GUESS_BYTES else self._largest_bytes)
        yield from self._repeat(now)

    def connected(self, now: float) -> Iterator[Want]:
        """Request again at once after a reconnect: blocks that were under way are lost."""
        self._silence_s = self._first_silence_s
        yield from self._repeat(now)

    def limit(self, block_bytes: int) -> None:
        """Request blocks of at most this size from now on."""
        self._largest_bytes = min(self._largest_bytes, block_bytes)
        if block_bytes < self._block_bytes:
            self._resize(block_bytes)

    def _resize(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._early.clear()  # they begin where no block begins now
        self._requested = self._written

    def _repeat(self, now: float) -> Iterator[Want]:
        self._requested_at = now
        gap, end = self._written, self._window_end()
        for early in (*sorted(self._early), end):
            if gap < min(early, end):
                yield self._want(gap, min(early, end))
            gap = early + len(self._early.get(early, b""))
        self._requested = end

    def _ask(self) -> Iterator[Want]:
        start, end = self._requested, self._window_end()
        if end > start:
            self._requested = end
            yield self._want(start, end)

    def _window_end(self) -> int:
        return min(self._written + self._window_blocks * self._block_bytes, self._size)

    def _want(self, start: int, end: int) -> Want:
        self._seq += 1
        return Want(start, -(-(end - start) // self._block_bytes), self._block_bytes, self._seq)
