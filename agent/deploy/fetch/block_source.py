"""Download a bundle over MQTT: connects the block protocol to the broker, the file and the clock.

Promises: the transfer survives restarts of the broker, the connection and the offering side. Time without a
connection does not count against the time limit.
Leaves to others: the protocol (`blocks`), and whether the bytes are the right ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Final

from agent.bundle.names import hex_digest
from agent.deploy.fetch.blocks import BlockPull, Write
from agent.deploy.interfaces import Control
from agent.deploy.store.disk_thread import in_disk_thread
from agent.deploy.store.part import Part
from agent.errors import EdgeError
from agent.wire.blocks import Want
from agent.wire.topics import BlockWant, block_filter, format_topic

# How long to wait for a block while the broker is connected: enough to restart `edgebundle deploy` by hand.
SILENCE_LIMIT_S: Final = 120.0
# How often to report the progress and to check the time limit.
POLL_S: Final = 1.0


class _Pulling:
    """One download."""

    def __init__(self, part: Part, pull: BlockPull, done: asyncio.Future[None]) -> None:
        self.part = part
        self.pull = pull
        self.done = done


class BlockSource:
    """Downloads bundles from any client that answers want documents.

    Parameters
    ----------
    control
        The connection; its owner calls `on_block` and `on_connected`.
    device
        This device's name.
    silence_limit_s
        How long to wait for a block while the broker is connected.
    clock
        Returns monotonic seconds; tests pass their own.
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
        """Append to `part` until it is complete.

        Parameters
        ----------
        digest
            `sha256:<hex>` of the bundle; it names the topics.
        part
            The download; its length is where to resume.
        progress
            Called with the number of downloaded bytes.

        Raises
        ------
        TimeoutError
            If no block arrived for `silence_limit_s` although the broker was connected.
        EndlessDataError
            If a block is longer than requested.
        NoSpaceError, StoreError
            If the part could not be written.
        """
        key = hex_digest(digest)
        now = self._clock()
        pulling = _Pulling(
            part,
            BlockPull(size=part.size, have=part.written, now=now),
            asyncio.get_running_loop().create_future(),
        )
        topic_filter = block_filter(self._device, key)
        self._pulling[key] = pulling
        self._control.want(topic_filter, 0)
        try:
            self._decide(key, pulling, pulling.pull.start(now))
            while not pulling.done.done():
                await asyncio.wait({pulling.done}, timeout=self._pause_s(pulling.pull))
                progress(part.written)
                self._check_silence(pulling)
                if self._control.connected:
                    self._decide(key, pulling, pulling.pull.tick(self._clock()))
            await pulling.done
            await in_disk_thread(part.sync)
        finally:
            del self._pulling[key]
            self._control.unsubscribe(topic_filter)
            if not pulling.done.done():
                pulling.done.cancel()
            elif not pulling.done.cancelled():
                pulling.done.exception()  # mark it as retrieved, in case this task was cancelled

    def on_block(self, key: str, offset: int, data: bytes) -> None:
        """Take a block of the bundle whose hex digest is `key`."""
        pulling = self._pulling.get(key)
        if pulling is not None and not pulling.done.done():
            self._decide(key, pulling, pulling.pull.block(offset, data, self._clock()))

    def on_connected(self) -> None:
        """Ask again after a reconnect: blocks that were under way are lost."""
        self._connected_at = self._clock()
        for key, pulling in self._pulling.items():
            if not pulling.done.done():
                self._decide(key, pulling, pulling.pull.connected(self._connected_at))

    def _pause_s(self, pull: BlockPull) -> float:
        """Return the seconds until the next look; without a connection there is nothing to repeat."""
        if not self._control.connected:
            return POLL_S
        return min(max(pull.ask_again_at - self._clock(), 0.0), POLL_S)

    def _decide(self, key: str, pulling: _Pulling, decisions: Iterator[Want | Write]) -> None:
        try:
            for decision in decisions:
                if isinstance(decision, Write):
                    pulling.part.append(decision.data)
                else:
                    topic = format_topic(BlockWant(self._device, key))
                    self._control.publish(topic, decision.to_bytes(), qos=0)
        except EdgeError as error:
            with contextlib.suppress(asyncio.InvalidStateError):
                pulling.done.set_exception(error)
            return
        if pulling.pull.complete and not pulling.done.done():
            pulling.done.set_result(None)

    def _check_silence(self, pulling: _Pulling) -> None:
        if pulling.done.done() or not self._control.connected:
            return
        quiet_s = self._clock() - max(pulling.pull.heard_at, self._connected_at)
        if quiet_s > self._silence_limit_s:
            raise TimeoutError(f"no block arrived over MQTT for {self._silence_limit_s:g} s")
