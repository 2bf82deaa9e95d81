"""Download a bundle over MQTT: connects the block protocol to the broker, the file and the clock.

Promises: the transfer survives restarts of the broker, the connection and the offering side. Time without a
connection does not count against the time limit. The event loop does not wait for the disk: a thread writes
blocks, and meanwhile at most one window of others is kept, however often the connection is lost.
Leaves to others: the protocol (`blocks`), and whether the bytes are the right ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.fetch.blocks import BLOCK_BYTES, BlockPull, Write
from agent.deploy.interfaces import Control
from agent.deploy.store.part import Part
from agent.disk_thread import in_disk_thread
from agent.errors import EdgeError, SourceError
from agent.mqtt.engine import MQTT_5
from agent.wire.blocks import MIN_BLOCK_BYTES, Want, largest_block
from agent.wire.document import MAX_SAFE_INTEGER
from agent.wire.topics import Block, BlockWant, block_filter, format_topic

# How long to wait for a block while the broker is connected: enough to restart `edgebundle deploy` by hand.
SILENCE_LIMIT_S: Final = 120.0
# How often to report the progress and to check the time limit.
POLL_S: Final = 1.0


class _Pulling:
    """One download."""

    def __init__(self, part: Part, pull: BlockPull) -> None:
        self.part = part
        self.pull = pull
        # Offset -> a block that has arrived since the last look, and when.
        self.arrived: dict[int, tuple[bytes, float]] = {}
        # What is to be written, in the order of the file.
        self.unwritten: list[bytes] = []
        self.is_writing = False
        self.written_at = pull.heard_at
        self.failure: EdgeError | None = None
        self.news = asyncio.Event()

    @property
    def done(self) -> bool:
        """Whether everything has arrived, and only needs to be written, or the download has failed."""
        return self.pull.complete or self.failure is not None


class BlockSource:
    """Downloads bundles from any client that answers want documents.

    The owner of the connection calls `on_block` and `on_connected`. A block is waited for `silence_limit_s`
    while the broker is connected.
    """

    def __init__(
        self,
        control: Control,
        device: str,
        *,
        silence_limit_s: float = SILENCE_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._device = device
        self._silence_limit_s = silence_limit_s
        self._clock = clock
        self._pulling: dict[str, _Pulling] = {}
        self._connected_at = clock()

    async def download(self, digest: str, part: Part, progress: Callable[[int], None]) -> None:
        """Append to `part`, whose length is where to resume, until it is complete.

        `digest` names the topics; `progress` is called with the number of downloaded bytes. Raises
        TimeoutError if no block arrived for `silence_limit_s` although the broker was connected,
        EndlessDataError if a block is longer than requested, and SourceError if the broker does not pass on
        packets of a useful size.
        """
        key = hex_digest(digest)
        now = self._clock()
        pull = BlockPull(size=part.size, have=part.written, now=now, guesses=self._control.version != MQTT_5)
        pull.limit(self._room(key))
        pulling = _Pulling(part, pull)
        topic_filter = block_filter(self._device, key)
        self._pulling[key] = pulling
        self._control.want(topic_filter, 0)
        try:
            self._decide(key, pulling, pulling.pull.start(now))
            while not pulling.done:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s(pulling.pull)):
                        await pulling.news.wait()
                pulling.news.clear()
                self._take(key, pulling)
                await self._write(pulling)
                progress(part.written)
                self._check_silence(pulling)
                if self._control.connected and not pulling.done:
                    self._decide(key, pulling, pulling.pull.tick(self._clock()))
            if pulling.failure is not None:
                raise pulling.failure
            await self._write(pulling)
            await in_disk_thread(part.sync)
        finally:
            del self._pulling[key]
            self._control.unsubscribe(topic_filter)

    def on_block(self, key: str, offset: int, data: bytes) -> None:
        """Take a block of the bundle whose hex digest is `key`."""
        pulling = self._pulling.get(key)
        if pulling is None or pulling.done or offset in pulling.arrived or not pulling.pull.expects(offset):
            return
        now = self._clock()
        if len(data) > BLOCK_BYTES:  # it ends the download, and is not worth its memory
            self._decide(key, pulling, pulling.pull.block(offset, data, now))
        else:
            pulling.arrived[offset] = data, now
        pulling.news.set()

    def on_connected(self) -> None:
        """Ask again after a reconnect: blocks that were under way are lost."""
        self._connected_at = self._clock()
        for key, pulling in self._pulling.items():
            try:
                pulling.pull.limit(self._room(key))
            except EdgeError as error:
                pulling.failure = error
                pulling.news.set()
                continue
            if not pulling.is_writing:  # else each reconnect would request, and keep, another window
                self._take(key, pulling)
            if not pulling.done:
                self._decide(key, pulling, pulling.pull.connected(self._connected_at))

    def _room(self, key: str) -> int:
        """Return how many bytes of a block the broker passes on."""
        most = self._control.max_packet_bytes
        topic = format_topic(Block(self._device, key, MAX_SAFE_INTEGER))
        room = largest_block(topic, most)
        if room < MIN_BLOCK_BYTES:
            raise SourceError(
                f"expected a broker that takes packets of {MIN_BLOCK_BYTES + most - room} bytes, "
                f"got one that takes at most {most}"
            )
        return room

    def _pause_s(self, pull: BlockPull) -> float:
        """Return the seconds until the next look; without a connection there is nothing to repeat."""
        if not self._control.connected:
            return POLL_S
        return min(max(pull.ask_again_at - self._clock(), 0.0), POLL_S)

    def _take(self, key: str, pulling: _Pulling) -> None:
        """Pass on the blocks that have arrived."""
        arrived, pulling.arrived = pulling.arrived, {}
        for offset, (data, now) in arrived.items():
            if not pulling.done:
                self._decide(key, pulling, pulling.pull.block(offset, data, now))

    def _decide(self, key: str, pulling: _Pulling, decisions: Iterator[Want | Write]) -> None:
        try:
            for decision in decisions:
                if isinstance(decision, Write):
                    pulling.unwritten.append(decision.data)
                else:
                    topic = format_topic(BlockWant(self._device, key))
                    self._control.publish(topic, decision.to_bytes(), qos=0)
        except EdgeError as error:
            pulling.failure = error

    async def _write(self, pulling: _Pulling) -> None:
        """Append what is to be written, in a thread."""
        blocks, pulling.unwritten = pulling.unwritten, []
        if not blocks:
            return
        pulling.is_writing = True
        writing = asyncio.ensure_future(in_disk_thread(_append, pulling.part, blocks))
        try:
            await asyncio.shield(writing)
        finally:
            if not writing.done():  # cancelled: the file must not be closed while it is written
                with contextlib.suppress(EdgeError):
                    await asyncio.shield(writing)
            pulling.is_writing = False
        pulling.written_at = self._clock()

    def _check_silence(self, pulling: _Pulling) -> None:
        if pulling.done or not self._control.connected:
            return
        quiet_s = self._clock() - max(pulling.pull.heard_at, pulling.written_at, self._connected_at)
        if quiet_s > self._silence_limit_s:
            raise TimeoutError(f"no block arrived over MQTT for {self._silence_limit_s:g} s")


def _append(part: Part, blocks: Iterable[bytes]) -> None:
    for block in blocks:
        part.append(block)
