"""`make hostile` in small: a few hundred hostile messages and frames, and a campaign that fails."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.nightly.hostile import packets
from tests.nightly.hostile.campaign import MIN_ASKED, MIN_COMPUTED, Result, given, replayed, run
from tests.nightly.hostile.frames import run_frames
from tests.nightly.hostile.packets import Packet
from tests.nightly.hostile.pauses import run_pauses
from tests.nightly.hostile.stage import Stage
from tests.nightly.hostile.strategies import CLIENT, DEPLOYER, NEIGHBOUR, hostile_packets
from tests.nightly.hostile.watched import PausesFile, WatchedSelector

pytestmark = pytest.mark.slow

SEED = 20_260_719


@pytest.fixture(scope="module")
def chunk() -> list[Packet]:
    return hostile_packets(SEED)


def test_packets_of_a_seed_are_always_the_same() -> None:
    first = hostile_packets(SEED, 20)
    assert hostile_packets(SEED, 20) == first
    assert hostile_packets(SEED + 1, 20) != first


def test_packets_are_of_all_kinds(chunk: list[Packet]) -> None:
    assert Counter(packet.user for packet in chunk).keys() == {CLIENT, DEPLOYER, NEIGHBOUR}
    assert {packet.qos for packet in chunk} == {0, 1, 2}
    assert len({packet.topic for packet in chunk}) > 30
    properties = {number for packet in chunk for number, _ in packet.properties}
    assert properties >= {packets.RESPONSE_TOPIC, packets.CONTENT_TYPE, packets.CORRELATION, packets.EXPIRY}
    assert max(len(packet.properties) for packet in chunk) > 256


async def test_agent_survives_hostile_packets_and_answers_an_honest_client(
    folder: Path, chunk: list[Packet]
) -> None:
    result = await run(
        SEED, given(chunk), folder / "stage", log=folder / "log", save=folder / "saved", progress=ignore
    )
    assert result.complaints == []
    assert result.messages == len(chunk)
    assert result.statuses[200] >= MIN_COMPUTED * MIN_ASKED


async def test_agent_survives_a_hostile_worker() -> None:
    result = await run_frames(SEED, 3000, 3)
    assert result.complaints == []
    assert result.refused > 300
    assert result.answers == 3
    assert result.honest >= 10


async def test_agent_that_ends_fails_the_campaign_and_the_packets_are_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.nightly.hostile.campaign.BATCH_LIMIT_S", 0.5)
    monkeypatch.setattr("tests.nightly.hostile.campaign._END_LIMIT_S", 0.0)
    monkeypatch.setattr("tests.nightly.hostile.honest.ANSWER_LIMIT_S", 0.5)
    packet = Packet(CLIENT, b"edge/v1/kitchen/models/twice/infer", b"{}", qos=1, properties=((2, bytes(4)),))

    def kill(place: Stage) -> None:
        assert place.device.process is not None
        place.device.process.kill()

    result = await run(
        0,
        given([packet]),
        folder / "stage",
        log=folder / "log",
        save=folder / "saved",
        progress=ignore,
        begin=kill,
    )
    assert not result.passed
    assert result.complaints[0] == "after 1 messages the agent did not answer within 0.5 s"
    assert "the agent's process has ended" in result.complaints
    assert [batch async for batch in replayed(folder / "saved")] == [[packet]]


async def test_flood_of_the_control_connection_is_measured_and_stops_nothing(folder: Path) -> None:
    result = await run_pauses("control", 1.0, 3.0, folder / "stage", log=folder / "log")
    # How long it pauses depends on the machine; `make hostile` has the limit.
    assert [line for line in result.complaints if "paused" not in line] == []
    assert result.sent > 10_000
    assert result.dropped > result.sent / 2
    assert result.turns > 100
    assert result.asked > 0
    assert len(result.deployments_s) == 1


def test_a_pause_is_from_one_look_at_the_selector_to_the_next(folder: Path) -> None:
    file = PausesFile(folder / "pauses", make=True)

    async def pause() -> None:
        await asyncio.sleep(0)
        time.sleep(0.06)
        await asyncio.sleep(0)

    loop = asyncio.SelectorEventLoop(WatchedSelector(file))
    loop.run_until_complete(pause())
    loop.close()
    pauses = file.read()
    assert pauses.longest_s >= pauses.longest_own_s > 0.05
    assert (pauses.above_50_ms, pauses.own_above_50_ms, pauses.above_500_ms) == (1, 1, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stage").mkdir()
    return tmp_path


def ignore(_result: Result) -> None:
    """Report no progress."""
