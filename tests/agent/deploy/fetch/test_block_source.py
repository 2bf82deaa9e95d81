"""Blocks over a connection that comes and goes: the clock and the control connection are fakes."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.deploy.fetch import block_source
from agent.deploy.fetch.block_source import BlockSource
from agent.deploy.fetch.blocks import BLOCK_BYTES, WINDOW_BLOCKS, BlockPull
from agent.deploy.store.part import Part
from agent.errors import EndlessDataError
from agent.wire import topics
from agent.wire.blocks import Want
from tests.agent.deploy.rig import DEVICE, FakeControl
from tests.patience import PATIENCE_S
from tests.virtual_time import settle

HEX = "ab" * 32


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Download:
    """One download of 1000 bytes, and how often it was looked at."""

    def __init__(self, part: Part) -> None:
        self.clock = Clock()
        self.control = FakeControl()
        self.source = BlockSource(self.control, DEVICE, silence_limit_s=120.0, clock=self.clock)
        self.looks = 0
        self.task = asyncio.ensure_future(self.source.download(f"sha256:{HEX}", part, self._look))

    def _look(self, _written: int) -> None:
        self.looks += 1

    async def looked(self, more: int = 2) -> None:
        """Wait until the transfer was looked at again, after everything that the test did before."""
        until = self.looks + more
        async with asyncio.timeout(PATIENCE_S):
            while self.looks < until and not self.task.done():
                await asyncio.sleep(0)

    @property
    def wants(self) -> list[Want]:
        return [
            Want.from_bytes(payload)
            for topic, payload in self.control.log
            if isinstance(topics.parse_topic(topic), topics.BlockWant)
        ]


class HangingDisk:
    """Appending to a part does not return until `back` is set."""

    def __init__(self, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.back = threading.Event(), threading.Event()
        self._append = part.append
        monkeypatch.setattr(part, "append", self._hang)

    async def until_it_hangs(self) -> None:
        """Wait until a thread appends."""
        while not self.hangs.is_set():
            await asyncio.sleep(0.001)

    def _hang(self, data: bytes) -> None:
        self.hangs.set()
        assert self.back.wait(PATIENCE_S)
        self._append(data)


@pytest.fixture
def part(tmp_path: Path) -> Iterator[Part]:
    with Part(tmp_path / "part", 1000) as opened:
        yield opened


async def test_time_without_a_connection_does_not_count(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_source, "POLL_S", 0.001)
    download = Download(part)
    download.control.connected = False
    download.clock.now_s = 10_000
    await download.looked()
    assert not download.task.done()
    download.control.connected = True
    download.source.on_connected()
    download.clock.now_s += 119
    await download.looked()
    assert not download.task.done()
    download.clock.now_s += 2
    with pytest.raises(TimeoutError, match="no block arrived over MQTT for 120 s"):
        await download.task


async def test_transfer_waits_for_the_connection_without_spinning(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_source, "POLL_S", 0.001)
    download = Download(part)
    download.control.connected = False
    await download.looked()
    download.clock.now_s = 1000  # long after the first request should have been repeated
    monkeypatch.setattr(block_source, "POLL_S", 60.0)
    await download.looked(1)
    looks = download.looks
    await settle()
    assert download.looks == looks
    download.task.cancel()


async def test_after_a_reconnect_the_request_is_repeated_and_the_file_completed(part: Part) -> None:
    download = Download(part)
    await asyncio.sleep(0)
    download.control.connected = False
    download.source.on_connected()
    download.control.connected = True
    assert [(want.offset, want.seq) for want in download.wants] == [(0, 1), (0, 2)]
    download.source.on_block(HEX, 0, bytes(1000))
    await download.task
    assert part.written == 1000
    assert download.control.filters == set(), "unsubscribed"


async def test_block_of_another_bundle_is_ignored(part: Part) -> None:
    download = Download(part)
    await asyncio.sleep(0)
    download.source.on_block("cd" * 32, 0, bytes(1000))
    assert part.written == 0
    download.task.cancel()


async def test_disk_that_hangs_holds_up_neither_the_event_loop_nor_the_memory(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_source, "BlockPull", functools.partial(BlockPull, block_bytes=10))
    disk = HangingDisk(part, monkeypatch)
    download = Download(part)
    await asyncio.sleep(0)
    rescue = threading.Timer(20, disk.back.set)  # or this thread would hang, too, and with it the test
    rescue.start()
    for offset in range(0, 1000, 10):
        download.source.on_block(HEX, offset, bytes(10))
        await disk.until_it_hangs()
    assert not disk.back.is_set(), "taking a block waits for the disk"
    (pulling,) = download.source._pulling.values()
    assert len(pulling.arrived) <= WINDOW_BLOCKS
    assert pulling.unwritten == []
    assert not download.task.done()
    rescue.cancel()
    disk.back.set()
    async with asyncio.timeout(PATIENCE_S):
        while not download.task.done():
            for offset in range(0, 1000, 10):  # what was dropped is asked for, and sent, again
                download.source.on_block(HEX, offset, bytes(10))
            await asyncio.sleep(0.001)
    await download.task
    assert part.written == 1000


async def test_connection_that_is_lost_often_does_not_fill_the_memory_while_the_disk_hangs(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = functools.partial(BlockPull, block_bytes=10, window_blocks=4)
    monkeypatch.setattr(block_source, "BlockPull", pull)
    disk = HangingDisk(part, monkeypatch)
    download = Download(part)
    await asyncio.sleep(0)
    download.source.on_block(HEX, 0, bytes(10))
    await disk.until_it_hangs()
    (pulling,) = download.source._pulling.values()
    for _ in range(5):
        for offset in range(0, 1000, 10):
            download.source.on_block(HEX, offset, bytes(10))
        download.source.on_connected()
        assert len(pulling.arrived) + len(pulling.unwritten) <= 4
    disk.back.set()
    async with asyncio.timeout(PATIENCE_S):
        while not download.task.done():
            for offset in range(0, 1000, 10):
                download.source.on_block(HEX, offset, bytes(10))
            await asyncio.sleep(0.001)
    await download.task
    assert part.written == 1000


@pytest.mark.parametrize("offset", [0, 500])
async def test_blocks_that_are_too_long_are_not_kept(part: Part, offset: int) -> None:
    download = Download(part)
    await asyncio.sleep(0)
    for _ in range(3):
        download.source.on_block(HEX, offset, bytes(BLOCK_BYTES + 1))
    (pulling,) = download.source._pulling.values()
    assert pulling.arrived == {}
    if offset:  # which was not requested
        assert not pulling.done
        download.source.on_block(HEX, 0, bytes(1000))
        await download.task
    else:
        with pytest.raises(EndlessDataError, match="expected a block of 1000 bytes at 0, got 65537"):
            await download.task


async def test_download_that_is_cancelled_while_it_writes_ends_after_the_write(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = HangingDisk(part, monkeypatch)
    download = Download(part)
    await asyncio.sleep(0)
    download.source.on_block(HEX, 0, bytes(1000))
    await disk.until_it_hangs()
    download.task.cancel()
    await settle()
    assert not download.task.done(), "its file would be closed, and another one could get its descriptor"
    disk.back.set()
    with pytest.raises(asyncio.CancelledError):
        await download.task
    assert part.written == 1000
