"""A bundle pulled over MQTT: the block protocol, with the connection, the file and the clock.

Promises: the transfer outlives the broker, the connection, and whoever offers the bundle, as long as they
come back; time without a connection is not held against anybody.
Leaves to others: the protocol (blocks.py), and whether the bytes are the right ones.
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
from agent.deploy.store.part import Part
from agent.errors import EdgeError
from agent.wire.blocks import Want
from agent.wire.topics import BlockWant, block_filter, format_topic

# How long nobody may answer while the broker is there: a person restarts `edgebundle deploy` within it.
PATIENCE_S: Final = 120.0


class _Pulling:
    """One bundle on its way."""

    def __init__(self, part: Part, pull: BlockPull, done: asyncio.Future[None]) -> None:
        self.part = part
        self.pull = pull
        self.done = done


class BlockSource:
    """Downloads bundles from whoever answers `want`.

    Parameters
    ----------
    control
        The connection; its owner passes on what comes, by `on_block` and `on_connected`.
    device
        This device's name.
    patience_s
        How long to wait for a block while the broker is there.
    """

    def __init__(self, control: Control, device: str, *, patience_s: float = PATIENCE_S) -> None:
        self._control = control
        self._device = device
        self._patience_s = patience_s
        self._pulling: dict[str, _Pulling] = {}
        self._connected_at = time.monotonic()

    async def download(self, digest: str, part: Part, progress: Callable[[int], None]) -> None:
        """Append to `part` until it is whole.

        Parameters
        ----------
        progress
            Called with the bytes that are there.

        Raises
        ------
        TimeoutError
            If the broker was there, and nobody answered.
        EndlessDataError
            If a block was longer than what was asked for.
        NoSpaceError, StoreError
            If the part could not be written.
        """
        key = hex_digest(digest)
        now = time.monotonic()
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
                pause_s = min(max(pulling.pull.ask_again_at - time.monotonic(), 0.0), 1.0)
                await asyncio.wait({pulling.done}, timeout=pause_s)
                progress(part.written)
                self._check_patience(pulling)
                if self._control.connected:
                    self._decide(key, pulling, pulling.pull.tick(time.monotonic()))
            await pulling.done
            await asyncio.to_thread(part.sync)
        finally:
            del self._pulling[key]
            self._control.unsubscribe(topic_filter)
            if not pulling.done.done():
                pulling.done.cancel()
            elif not pulling.done.cancelled():
                pulling.done.exception()  # seen, whoever was cancelled meanwhile

    def on_block(self, key: str, offset: int, data: bytes) -> None:
        """Take a block that came for the bundle with that hex digest."""
        pulling = self._pulling.get(key)
        if pulling is not None and not pulling.done.done():
            self._decide(key, pulling, pulling.pull.block(offset, data, time.monotonic()))

    def on_connected(self) -> None:
        """Ask again: the connection is new, and the subscriptions are on their way."""
        self._connected_at = time.monotonic()
        for key, pulling in self._pulling.items():
            if not pulling.done.done():
                self._decide(key, pulling, pulling.pull.connected(self._connected_at))

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

    def _check_patience(self, pulling: _Pulling) -> None:
        if pulling.done.done() or not self._control.connected:
            return
        quiet_s = time.monotonic() - max(pulling.pull.heard_at, self._connected_at)
        if quiet_s > self._patience_s:
            raise TimeoutError(f"nobody offered the bundle over MQTT for {self._patience_s:g} s")
