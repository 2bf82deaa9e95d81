"""Home Assistant's entities show what the agent publishes, and are removed when they should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from agent.service.announcements import HOME_ASSISTANT_FILE
from agent.service.metrics.home_assistant import Device, discovery_document
from tests.agent.service.conftest import StartService
from tests.agent.service.test_service import Watcher
from tests.conftest import BrokerProcess
from tests.patience import until

TOPIC = "homeassistant/device/edge_kitchen/config"


class Assistant(Watcher):
    """The parts of Home Assistant that read discovery documents and render templates."""

    async def __aenter__(self) -> Assistant:
        await super().__aenter__()
        await self.connection.subscribe("homeassistant/#")
        return self

    @property
    def said(self) -> list[dict[str, Any] | None]:
        found = [message.payload for message in self.messages if message.topic == TOPIC]
        return [json.loads(payload) if payload else None for payload in found]

    def entities(self) -> dict[str, Any]:
        return (self.said and (self.said[-1] or {}).get("components")) or {}

    def value(self, entity: str) -> str | None:
        part = self.entities()[entity]
        found = [message.payload for message in self.messages if message.topic == part["state_topic"]]
        if not found:
            return None
        return jinja2.Template(part["value_template"]).render(value_json=json.loads(found[-1]))


ON = {"home_assistant": {"enabled": True}, "metrics_interval_s": 0.1}


async def test_entities_read_what_the_agent_says(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with Assistant(mosquitto.port) as assistant:
        async with start_service(mosquitto.port, **ON) as rig:
            await rig.service.models.activate(rig.signer.bundle())
            await until(lambda: "echo_ready" in assistant.entities())
            await until(lambda: assistant.value("echo_latency") == "None")  # unknown, before the first answer
            client = await rig.client()
            for _ in range(3):
                await client.ask(b"hello")
            await until(lambda: assistant.value("echo_answers") == "3")
            assert assistant.value("echo_ready") == "ON"
            assert assistant.value("state") == "ON"
            samples = rig.service.samples()
            latency_s = samples['edge_inference_latency_seconds{model="echo",quantile="0.5"}']
            await until(lambda: float(assistant.value("echo_latency") or 0) == round(latency_s * 1000, 2))
            assert float(assistant.value("free_space") or 0) > 0
            ids = [part["unique_id"] for part in assistant.entities().values()]
            assert len(set(ids)) == len(ids)
            assert all(
                part["platform"] in ("sensor", "binary_sensor") for part in assistant.entities().values()
            )
        await until(lambda: assistant.value("state") == "OFF")


async def test_entities_of_a_model_that_is_gone_are_taken_away(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with Assistant(mosquitto.port) as assistant, start_service(mosquitto.port, **ON) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        await until(lambda: "echo_ready" in assistant.entities())
        await rig.service.models.deactivate("echo")
        await until(lambda: bool(assistant.entities()) and "echo_ready" not in assistant.entities())
        removing, clean = assistant.said[-2:]
        assert removing is not None
        assert removing["components"]["echo_ready"] == {"platform": "binary_sensor"}
        assert removing["components"]["echo_latency"] == {"platform": "sensor"}
        assert clean is not None
        assert not any(name.startswith("echo") for name in clean["components"])


async def test_announcement_is_withdrawn_once_when_switched_off(
    mosquitto: BrokerProcess, start_service: StartService, tmp_path: Path
) -> None:
    record = tmp_path / "state-kitchen" / HOME_ASSISTANT_FILE
    async with Assistant(mosquitto.port) as assistant:
        async with start_service(mosquitto.port, **ON):
            await until(lambda: bool(assistant.entities()))
        assert TOPIC in json.loads(record.read_text())
        async with start_service(mosquitto.port):
            await until(lambda: assistant.said[-1] is None)
            await until(lambda: not record.exists())
        count = len(assistant.said)
        async with start_service(mosquitto.port):
            pass
        # The last message of the third session: everything that it published before has arrived.
        last = {"state": "stopped", "session_seq": 3}
        await until(lambda: last.items() <= assistant.latest("state").items())
        assert len(assistant.said) == count


async def test_announcement_moves_to_another_prefix(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with Assistant(mosquitto.port) as assistant:
        async with start_service(mosquitto.port, **ON):
            await until(lambda: bool(assistant.entities()))
        elsewhere = {"enabled": True, "prefix": "ha/discovery"}
        async with start_service(mosquitto.port, home_assistant=elsewhere):
            await until(lambda: assistant.said[-1] is None)


async def test_nothing_is_announced_unless_it_is_asked_for(
    mosquitto: BrokerProcess, start_service: StartService
) -> None:
    async with Assistant(mosquitto.port) as assistant, start_service(mosquitto.port) as rig:
        await rig.service.models.activate(rig.signer.bundle())
        await until(lambda: (assistant.latest("models/echo/state") or {}).get("ready") is True)
        assert assistant.said == []


@pytest.mark.parametrize("zone", ["cpu-thermal", "it's", 'a"b', "a\\b"])
def test_zone_of_any_name_is_read(zone: str) -> None:
    document = discovery_document(
        Device("kitchen", "1", "board", models=[], zones=[zone], throttled=True, interval_s=10)
    )
    [part] = [part for name, part in document["components"].items() if name.startswith("temperature")]
    escaped = zone.replace("\\", "\\\\").replace('"', '\\"')
    values = {f'edge_temperature_celsius{{zone="{escaped}"}}': 48.5}
    assert jinja2.Template(part["value_template"]).render(value_json=values) == "48.5"
