"""`edgebundle deploy` over a broker that takes only small packets: smaller blocks, or an error at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.deploy.fetch import blocks
from agent.deploy.fetch.blocks import BLOCK_BYTES
from builder.errors import FleetError
from builder.fleet.deploy import DeployResult, deploy_async
from builder.fleet.offer import Offer
from edgebundle.broker import Broker
from tests.agent.deploy.rig import DEVICE, make_bundle
from tests.builder.fleet.rig import Device
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S

BUNDLE = make_bundle(params=bytes(range(256)) * 1000)


@contextmanager
def small(folder: Path, max_packet_bytes: int) -> Iterator[BrokerProcess]:
    broker = BrokerProcess("mosquitto", folder, extra=f"max_packet_size {max_packet_bytes}\n")
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


async def deployed(folder: Path, broker: BrokerProcess, agent: str = "5", ours: str = "5") -> DeployResult:
    path = folder / "a.bundle"
    path.write_bytes(BUNDLE.raw)
    async with Device(folder / "state", broker.url, protocol=agent) as device:
        # Much shorter than the time that an agent waits for a block.
        result = await deploy_async(path, DEVICE, Broker(broker.url, protocol=ours), wait_s=60.0)
        assert device.models.serving == ({"digits": "1.0.0"} if result.ok else {})
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "ours"), [("5", "5"), ("5", "3.1.1"), ("3.1.1", "5"), ("3.1.1", "3.1.1")])
async def test_blocks_are_as_small_as_the_broker_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, ours: str
) -> None:
    defaults = blocks.BlockPull.__init__.__kwdefaults__ or {}
    monkeypatch.setitem(defaults, "silence_s", 0.2)
    with small(tmp_path, 60_000) as broker:
        result = await deployed(tmp_path, broker, agent, ours)
    assert result.ok
    known = agent == "5" or ours == "5"
    assert not known or result.sent_bytes <= len(BUNDLE.raw) + 60_000


@pytest.mark.slow
async def test_broker_for_tiny_packets_is_enough_for_a_bundle(tmp_path: Path) -> None:
    with small(tmp_path, 1500) as broker:
        assert (await deployed(tmp_path, broker)).ok


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "ours"), [("5", "5"), ("3.1.1", "5")])
async def test_broker_that_takes_no_block_is_an_error_at_once(tmp_path: Path, agent: str, ours: str) -> None:
    with small(tmp_path, 350) as broker:
        began = time.monotonic()
        with pytest.raises(FleetError, match="packets of at most 350") as refused:
            await deployed(tmp_path, broker, agent, ours)
        assert time.monotonic() - began < PATIENCE_S
    assert refused.value.hint == "raise the broker's limit for packets (mosquitto: max_packet_size)"


@pytest.mark.slow
async def test_agent_that_does_not_ask_for_smaller_blocks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An earlier agent: it drops what is short, and asks again.
    monkeypatch.setattr(blocks.BlockPull, "limit", lambda _pull, _bytes: None)
    monkeypatch.setattr("agent.deploy.fetch.block_source.BlockSource._room", lambda *_: BLOCK_BYTES)
    with (
        small(tmp_path, 60_000) as broker,
        pytest.raises(FleetError, match="packets of at most 60000 bytes"),
    ):
        await deployed(tmp_path, broker)


def test_blocks_that_are_too_large_are_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(1000))
    want = b'{"offset": 100, "count": 4, "block_bytes": 400, "seq": 1}'
    with Offer(path) as offer:
        assert [(start, len(data)) for start, data in offer.blocks(want, 300)] == [(100, 300)]
        assert [start for start, _ in offer.blocks(want, 400)] == [100, 500, 900]
