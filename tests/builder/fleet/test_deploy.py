"""`edgebundle deploy` with a real broker and agent: completed, interrupted, concurrent, refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agent.deploy.fetch.blocks import BLOCK_BYTES
from agent.errors import EdgeError
from agent.mqtt.message import Message
from agent.wire import topics
from builder.errors import FleetError, PackageError
from builder.fleet.client import Client
from builder.fleet.deploy import DeployProgress, deploy_async
from edgebundle.broker import Broker
from tests.agent.deploy.rig import DEVICE, Bundle, make_bundle
from tests.builder.fleet.rig import Device
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, until


def write(folder: Path, bundle: Bundle) -> Path:
    path = folder / f"{bundle.hex[:12]}.bundle"
    path.write_bytes(bundle.raw)
    return path


@pytest.mark.slow
async def test_a_bundle_is_deployed_over_either_broker(broker: BrokerProcess, tmp_path: Path) -> None:
    bundle = make_bundle(params=b"p" * 1_000_000)
    seen: list[DeployProgress] = []
    async with Device(tmp_path / "state", broker.url) as device:
        result = await deploy_async(write(tmp_path, bundle), DEVICE, Broker(broker.url), progress=seen.append)
        assert device.models.serving == {"digits": "1.0.0"}
    assert (result.ok, result.model, result.version, result.digest) == (
        True,
        "digits",
        "1.0.0",
        bundle.digest,
    )
    assert result.sent_bytes == len(bundle.raw)
    assert {"verifying", "testing", "committing"} <= {progress.step for progress in seen}


@pytest.mark.slow
async def test_broker_that_restarts_without_memory_costs_only_time(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("broker"), persistent=False)
    broker.start()
    try:
        bundle = make_bundle(params=b"p" * 30_000_000)
        async with Device(tmp_path / "state", broker.url) as device:
            task = asyncio.create_task(deploy_async(write(tmp_path, bundle), DEVICE, Broker(broker.url)))
            part = device.store.part_path(bundle.digest)
            await until(lambda: not (not part.exists() or part.stat().st_size < 4_000_000))
            await asyncio.to_thread(broker.restart)
            result = await asyncio.wait_for(task, PATIENCE_S)
        assert result.ok
        assert result.sent_bytes < 1.5 * len(bundle.raw), "it went on where it was"
    finally:
        broker.stop()


@pytest.mark.slow
async def test_agent_that_restarts_during_a_transfer_resumes_it(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    bundle = make_bundle(params=b"p" * 30_000_000)
    path = write(tmp_path, bundle)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        task = asyncio.create_task(deploy_async(path, DEVICE, Broker(mosquitto.url)))
        part = device.store.part_path(bundle.digest)
        await until(lambda: not (not part.exists() or part.stat().st_size < 4_000_000))
    there = part.stat().st_size
    assert 4_000_000 <= there < len(bundle.raw)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        result = await asyncio.wait_for(task, PATIENCE_S)
        assert device.models.serving == {"digits": "1.0.0"}
    assert result.ok
    assert result.sent_bytes <= len(bundle.raw) + 2 * 64 * BLOCK_BYTES, (
        "at most what was under way comes twice"
    )


async def test_model_that_fails_at_once_is_not_a_success(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    async with Device(tmp_path / "state", mosquitto.url) as device:
        device.models.stillborn = {"digits"}
        result = await deploy_async(write(tmp_path, make_bundle()), DEVICE, Broker(mosquitto.url))
    assert (result.ok, result.status, result.message) == (False, "FAILED", "3 workers died within 60 s")


async def test_a_second_model_leaves_the_first_in_service(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    async with Device(tmp_path / "state", mosquitto.url) as device:
        for bundle in (make_bundle(), make_bundle(name="faces"), make_bundle(name="words")):
            result = await deploy_async(write(tmp_path, bundle), DEVICE, Broker(mosquitto.url))
            assert result.ok
        assert set(device.models.serving) == {"digits", "faces", "words"}


async def test_what_is_desired_survives_a_broker_that_forgot_it(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("broker"), persistent=False)
    broker.start()
    try:
        async with Device(tmp_path / "state", broker.url) as device:
            first, second = make_bundle(), make_bundle(name="faces")
            assert (await deploy_async(write(tmp_path, first), DEVICE, Broker(broker.url))).ok
            await asyncio.to_thread(broker.restart)
            await device.connection.wait_connected()
            assert (await deploy_async(write(tmp_path, second), DEVICE, Broker(broker.url))).ok
            assert set(device.models.serving) == {"digits", "faces"}
    finally:
        broker.stop()


@pytest.mark.slow
async def test_simultaneous_deployments_all_succeed(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    bundles = [make_bundle(name=f"model-{index}") for index in range(6)]
    async with Device(tmp_path / "state", mosquitto.url) as device:
        results = await asyncio.gather(
            *(
                deploy_async(write(tmp_path, bundle), DEVICE, Broker(mosquitto.url), wait_s=PATIENCE_S)
                for bundle in bundles
            )
        )
        assert [result.status for result in results] == ["SUCCEEDED"] * 6
        assert len(device.models.serving) == 6


async def test_a_replayed_older_bundle_is_refused_with_its_reason(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    old, new = make_bundle(counter=1), make_bundle(version="2.0.0", counter=2)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        assert (await deploy_async(write(tmp_path, old), DEVICE, Broker(mosquitto.url))).ok
        assert (await deploy_async(write(tmp_path, new), DEVICE, Broker(mosquitto.url))).ok
        result = await deploy_async(write(tmp_path, old), DEVICE, Broker(mosquitto.url))
        assert (result.status, result.result, result.code) == ("REJECTED", "REJECTED", "ERR_ROLLBACK")
        assert "a security counter of 2 or higher" in result.message
        assert device.models.serving == {"digits": "2.0.0"}


@pytest.mark.slow
async def test_documents_of_other_jobs_and_agents_are_ignored(broker: BrokerProcess, tmp_path: Path) -> None:
    """Amqtt sends a new subscriber messages that are retained at other topics."""
    old, new = make_bundle(counter=1), make_bundle(version="2.0.0", counter=2)
    async with Device(tmp_path / "state", broker.url) as device:
        for bundle in (old, new):
            assert (await deploy_async(write(tmp_path, bundle), DEVICE, Broker(broker.url))).ok
        result = await deploy_async(write(tmp_path, old), DEVICE, Broker(broker.url))
        assert (result.status, result.code) == ("REJECTED", "ERR_ROLLBACK")
        assert device.models.serving == {"digits": "2.0.0"}


async def test_a_foreign_source_is_refused(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    async with Device(tmp_path / "state", mosquitto.url) as device:
        result = await deploy_async(
            write(tmp_path, make_bundle()), DEVICE, Broker(mosquitto.url), source="https://evil.example/a"
        )
        assert (result.status, result.code) == ("REJECTED", "ERR_SOURCE")
        assert device.models.serving == {}


async def test_a_broker_that_knows_no_agent_is_told_soon(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    deploying = deploy_async(
        write(tmp_path, make_bundle()), "kitchen", Broker(mosquitto.url), wait_s=10 * PATIENCE_S
    )
    with pytest.raises(FleetError, match="no agent called kitchen is known") as caught:
        await asyncio.wait_for(deploying, PATIENCE_S)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("the broker knows no agent: check that edge-agent runs")


async def test_wrong_name_is_told_soon_with_the_known_ones(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    async with Device(tmp_path / "state", mosquitto.url):
        deploying = deploy_async(
            write(tmp_path, make_bundle()), "kitchne", Broker(mosquitto.url), wait_s=10 * PATIENCE_S
        )
        with pytest.raises(FleetError, match="no agent called kitchne is known") as caught:
            await asyncio.wait_for(deploying, PATIENCE_S)
    assert caught.value.hint == "use one of the agents at this broker: kitchen"


@pytest.mark.slow
async def test_no_result_in_time_is_an_error_with_the_last_step(
    mosquitto: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_arguments: Any) -> None:
        await asyncio.sleep(60)

    async with Device(tmp_path / "state", mosquitto.url) as device:
        monkeypatch.setattr(device.models, "activate", never)
        with pytest.raises(FleetError, match=r"had not finished after 2 s: IN_PROGRESS testing"):
            await deploy_async(write(tmp_path, make_bundle()), DEVICE, Broker(mosquitto.url), wait_s=2.0)


async def test_file_that_is_not_a_bundle_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "a.bundle"
    path.write_bytes(b"hello")
    with pytest.raises((EdgeError, PackageError)):
        await deploy_async(path, DEVICE, Broker("mqtt://127.0.0.1:1"))


async def test_stranger_who_answers_first_delays_a_transfer_but_forges_nothing(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    bundle = make_bundle(params=b"p" * 300_000)

    def rubbish(topic: topics.Topic, message: Message) -> None:
        if isinstance(topic, topics.BlockWant):
            want = json.loads(message.payload)
            for index in range(want["count"]):
                offset = want["offset"] + index * want["block_bytes"]
                size = min(want["block_bytes"], len(bundle.raw) - offset)
                if size > 0:
                    where = topics.format_topic(topics.Block(DEVICE, bundle.hex, offset))
                    stranger.publish(where, bytes(size), qos=0)

    async with Device(tmp_path / "state", mosquitto.url) as device:
        async with Client(Broker(mosquitto.url), rubbish) as stranger:
            await stranger.subscribe(topics.format_topic(topics.BlockWant(DEVICE, bundle.hex)))
            result = await deploy_async(
                write(tmp_path, bundle), DEVICE, Broker(mosquitto.url), wait_s=PATIENCE_S
            )
            if not result.ok:
                assert result.code == "ERR_MIX_AND_MATCH"
                assert device.models.serving == {}
        result = await deploy_async(write(tmp_path, bundle), DEVICE, Broker(mosquitto.url), wait_s=PATIENCE_S)
        assert result.ok
