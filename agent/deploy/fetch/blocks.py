"""Pull a bundle over MQTT in blocks: the protocol, without the MQTT.

Promises: bytes and times go in, decisions come out. What is written is contiguous, so the length of the
file on disk is all that a resumed pull needs to know; what was not asked for is dropped; nothing beyond the
announced size is ever written, and at most one window of blocks is held in memory.
Leaves to others: the broker, the file, the clock, and the digest at the end. (That digest is the only thing
that makes the bytes trustworthy: whoever may publish to the block topics can spoil a transfer, never forge
one.)

The exchange, at QoS 0 (this protocol asks again by itself, so the broker need not):

==================================  =================================================================
`bundles/<hex digest>/want`       agent: `{"offset","count","block_bytes","seq"}`
`bundles/<hex digest>/block/<n>`  whoever has the file: up to `block_bytes` raw bytes from offset n
==================================  =================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from agent.errors import EndlessDataError
from agent.wire.blocks import MAX_COUNT, Want

# Measured on loopback (docs/decisions/0004): from 64 KiB to 1 MiB makes no difference that exceeds the
# noise, and a small block is asked for again, or waited for, for less long on a slow link.
BLOCK_BYTES: Final = 64 * 1024
# Blocks asked for and not yet here: 4 MiB, which is also the most memory that a pull holds.
WINDOW_BLOCKS: Final = MAX_COUNT
# The first re-ask after this long without a block; it doubles up to the longest while nobody answers.
SILENCE_S: Final = 2.0
LONGEST_SILENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Write:
    """Append `data` to the file; it belongs at `offset`, which is where the file ends."""

    offset: int
    data: bytes


class BlockPull:
    """One bundle being pulled.

    The window starts at two blocks, grows by one with each block that comes, and is halved by silence: a
    slow link is not asked for megabytes that would queue up in the broker, a fast one is busy after a few
    blocks.

    Parameters
    ----------
    size
        Bytes of the whole bundle, as the deployment announced it.
    have
        Bytes that are on disk already.
    block_bytes, window_blocks
        How much to ask for at a time, and how many blocks may be under way at most.
    silence_s, longest_silence_s
        When to ask again.
    now
        A monotonic time in seconds, like every `now` below.
    """

    def __init__(
        self,
        *,
        size: int,
        have: int,
        now: float,
        block_bytes: int = BLOCK_BYTES,
        window_blocks: int = WINDOW_BLOCKS,
        silence_s: float = SILENCE_S,
        longest_silence_s: float = LONGEST_SILENCE_S,
    ) -> None:
        if not 0 <= have <= size or block_bytes < 1 or window_blocks < 1:
            raise ValueError(f"cannot pull {size} bytes in blocks of {block_bytes} when {have} are here")
        self._size = size
        self._written = have  # the file's length: all before it is on disk
        self._asked = have  # all before it has been asked for
        self._early: dict[int, bytes] = {}  # blocks that overtook one before them
        self._block_bytes = block_bytes
        self._most_blocks = window_blocks
        self._window_blocks = min(2, window_blocks)
        self._first_silence_s = silence_s
        self._silence_s = silence_s
        self._longest_silence_s = longest_silence_s
        self._heard_at = now
        self._asked_at = now
        self._seq = 0

    @property
    def written(self) -> int:
        """Bytes of the file so far."""
        return self._written

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return self._written == self._size

    @property
    def ask_again_at(self) -> float:
        """When `tick` has something to do next."""
        return max(self._asked_at, self._heard_at) + self._silence_s

    @property
    def heard_at(self) -> float:
        """When the last block came that was of use."""
        return self._heard_at

    def start(self, now: float) -> Iterator[Want]:
        """Ask for the first window."""
        self._asked_at = now
        yield from self._ask()

    def block(self, offset: int, data: bytes, now: float) -> Iterator[Write | Want]:
        """Take a block that came, and say what to write and what to ask for.

        Raises
        ------
        EndlessDataError
            If the block is longer than what was asked for.
        """
        reach = min(self._written + self._most_blocks * self._block_bytes, self._size)
        if not self._written <= offset < reach or (offset - self._written) % self._block_bytes:
            return  # a copy of one that is written, or never asked for
        expected = min(self._block_bytes, self._size - offset)
        if len(data) > expected:
            raise EndlessDataError(
                f"a block of {len(data)} bytes came at {offset}, {expected} were asked for"
            )
        if len(data) < expected or offset in self._early:
            return  # a short block is as good as a lost one: silence asks for it again
        # A link that needs a second for a block must not be asked again after two.
        self._silence_s = min(max(self._first_silence_s, 4 * (now - self._heard_at)), self._longest_silence_s)
        self._heard_at = now
        self._window_blocks = min(self._window_blocks + 1, self._most_blocks)
        self._early[offset] = data
        while (ready := self._early.pop(self._written, None)) is not None:
            yield Write(self._written, ready)
            self._written += len(ready)
        self._asked = max(self._asked, self._written)
        # Asking when half a window is left keeps the link busy with fewer requests than one for each block.
        if 2 * (self._asked - self._written) <= self._window_blocks * self._block_bytes:
            yield from self._ask()

    def tick(self, now: float) -> Iterator[Want]:
        """Ask again for what is missing, if it has been silent for long enough."""
        if now < self.ask_again_at or self.complete:
            return
        self._silence_s = min(2 * self._silence_s, self._longest_silence_s)
        self._window_blocks = max(1, self._window_blocks // 2)
        yield from self._repeat(now)

    def connected(self, now: float) -> Iterator[Want]:
        """Ask again at once: the connection is new, and what was under way is lost."""
        self._silence_s = self._first_silence_s
        yield from self._repeat(now)

    def _repeat(self, now: float) -> Iterator[Want]:
        self._asked_at = now
        gap, end = self._written, self._window_end()
        for early in (*sorted(self._early), end):
            if gap < min(early, end):
                yield self._want(gap, min(early, end))
            gap = early + len(self._early.get(early, b""))
        self._asked = end

    def _ask(self) -> Iterator[Want]:
        start, end = self._asked, self._window_end()
        if end > start:
            self._asked = end
            yield self._want(start, end)

    def _window_end(self) -> int:
        return min(self._written + self._window_blocks * self._block_bytes, self._size)

    def _want(self, start: int, end: int) -> Want:
        self._seq += 1
        return Want(start, -(-(end - start) // self._block_bytes), self._block_bytes, self._seq)
