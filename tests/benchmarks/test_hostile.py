"""`make hostile` in small: a few hundred hostile messages and frames, and a campaign that fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.hostile import packets
from benchmarks.hostile.campaign import Result, drawn, replayed, run
from benchmarks.hostile.frames import run_frames
from benchmarks.hostile.packets import Packet
from benchmarks.hostile.stage import Stage
from benchmarks.hostile.strategies import CHUNK, CLIENT, DEPLOYER, NEIGHBOUR, hostile_packets

pytestmark = pytest.mark.slow

SEED = 20_260_719
MESSAGES = 2 * CHUNK


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


async def test_agent_survives_hostile_packets_and_answers_an_honest_client(tmp_path: Path) -> None:
    result = await run(
        SEED,
        drawn(SEED, MESSAGES),
        _folder(tmp_path, "stage"),
        tmp_path / "log",
        tmp_path / "saved",
        lambda _result: None,
    )
    assert result.complaints == []
    assert result.messages == MESSAGES
    assert result.statuses[200] > 20


async def test_agent_survives_a_hostile_worker() -> None:
    result = await run_frames(SEED, 3000)
    assert result.complaints == []
    assert result.refused > 300
    assert result.answers == 30
    assert result.honest > 10


async def test_agent_that_stops_answering_fails_the_campaign_and_its_packets_are_saved(
    tmp_path: Path, chunk: list[Packet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.hostile.campaign.BATCH_LIMIT_S", 1.0)
    monkeypatch.setattr("benchmarks.hostile.honest.ANSWER_LIMIT_S", 1.0)
    monkeypatch.setattr("benchmarks.hostile.campaign._END_LIMIT_S", 1.0)
    killed = asyncio.Event()
    pids: list[int] = []
    of_stage = Stage.pid.fget  # type: ignore[attr-defined]

    def pid(place: Stage) -> int:
        pids.append(of_stage(place))
        device = place.device

        def progress_kills() -> None:
            if not killed.is_set() and device.process is not None:
                killed.set()
                device.process.kill()

        asyncio.get_running_loop().call_later(0.5, progress_kills)
        return pids[0]

    monkeypatch.setattr(Stage, "pid", property(pid))
    saved = tmp_path / "saved"
    result = Result(0)

    async def batches():  # type: ignore[no-untyped-def]  # noqa: ANN202
        while True:
            yield chunk[:10]

    result = await run(
        0, batches(), _folder(tmp_path, "stage"), tmp_path / "log", saved, lambda _result: None
    )
    assert not result.passed
    assert any("did not answer" in line or "no answer" in line for line in result.complaints)
    assert "the agent's process has ended" in result.complaints
    again = [packet async for batch in replayed(saved) for packet in batch]
    assert again[:10] == chunk[:10]


def _folder(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder
