"""A rollback is a deployment of the version that the agent has kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.wire import topics
from agent.wire.presence import Presence
from agent.wire.reported import ReportedModel
from builder.errors import FleetError
from builder.fleet import rollback
from builder.fleet.client import Client
from builder.fleet.deploy import deploy_async
from builder.fleet.rollback import rollback_async
from edgebundle.broker import Broker
from tests.agent.deploy.rig import DEVICE, Bundle, make_bundle
from tests.builder.fleet.rig import Device
from tests.conftest import BrokerProcess


def write(folder: Path, bundle: Bundle) -> Path:
    path = folder / f"{bundle.hex[:12]}.bundle"
    path.write_bytes(bundle.raw)
    return path


@pytest.mark.slow
async def test_there_and_back(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    where = Broker(mosquitto.url)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        await deploy_async(write(tmp_path, make_bundle("digits", "1.0.0")), DEVICE, where)
        with pytest.raises(FleetError, match="kept no previous version of digits"):
            await rollback_async(DEVICE, "digits", where)
        await deploy_async(write(tmp_path, make_bundle("digits", "2.0.0")), DEVICE, where)
        steps: list[str] = []
        result = await rollback_async(DEVICE, "digits", where, progress=lambda now: steps.append(now.step))
        assert result.ok
        assert result.version == "1.0.0"
        assert result.sent_bytes == 0
        assert "testing" in steps
        assert device.models.serving == {"digits": "1.0.0"}
        assert (await rollback_async(DEVICE, "digits", where)).ok
        assert device.models.serving == {"digits": "2.0.0"}
        with pytest.raises(FleetError, match="reports no model faces") as caught:
            await rollback_async(DEVICE, "faces", where)
        assert caught.value.hint == "its models: digits"


@pytest.mark.slow
async def test_a_report_that_is_late_does_not_hide_that_the_agent_has_changed(
    mosquitto: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, asked = Broker(mosquitto.url), 0
    ask = rollback._reported

    async def once(agent: str, model: str, broker: Broker) -> ReportedModel:
        nonlocal asked
        asked += 1
        if asked > 1:
            raise FleetError("late", hint="later")
        return await ask(agent, model, broker)

    monkeypatch.setattr(rollback, "_reported", once)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        for version in ("1.0.0", "2.0.0"):
            await deploy_async(write(tmp_path, make_bundle("digits", version)), DEVICE, where)
        assert (await rollback_async(DEVICE, "digits", where)).ok
        assert device.models.serving == {"digits": "1.0.0"}
    assert asked == 2


@pytest.mark.slow
async def test_lower_counter_is_refused_and_the_newer_version_serves(
    mosquitto: BrokerProcess, tmp_path: Path
) -> None:
    where = Broker(mosquitto.url)
    async with Device(tmp_path / "state", mosquitto.url) as device:
        for version, counter in (("1.0.0", 1), ("2.0.0", 2)):
            await deploy_async(write(tmp_path, make_bundle("digits", version, counter)), DEVICE, where)
        result = await rollback_async(DEVICE, "digits", where)
        assert (result.status, result.code) == ("REJECTED", "ERR_ROLLBACK")
        assert device.models.serving == {"digits": "2.0.0"}


@pytest.mark.slow
async def test_absent_agent_is_told_as_by_deploy(mosquitto: BrokerProcess, tmp_path: Path) -> None:
    where = Broker(mosquitto.url)
    with pytest.raises(FleetError, match="no agent called nobody is known") as caught:
        await rollback_async("nobody", "digits", where)
    assert "the broker knows no agent" in (caught.value.hint or "")
    async with Device(tmp_path / "state", mosquitto.url):
        with pytest.raises(FleetError, match="no agent called nobody is known") as caught:
            await rollback_async("nobody", "digits", where)
    assert caught.value.hint == f"use one of the agents at this broker: {DEVICE}"


@pytest.mark.slow
async def test_agent_without_a_report_and_impossible_names(mosquitto: BrokerProcess) -> None:
    state = topics.format_topic(topics.State("mute"))
    async with Client(Broker(mosquitto.url), lambda _topic, _message: None) as client:
        await client.publish(state, Presence("online", 1, "1.0.0").to_bytes(), retain=True)
    with pytest.raises(FleetError, match="mute has not reported"):
        await rollback_async("mute", "digits", Broker(mosquitto.url))
    for agent, model in (("a/b", "digits"), ("a", "../x")):
        with pytest.raises(FleetError, match="expected the names"):
            await rollback_async(agent, model, Broker("mqtt://127.0.0.1:1"))
