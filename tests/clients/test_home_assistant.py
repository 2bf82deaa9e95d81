"""The recipe for Home Assistant in Home Assistant itself: `make test-home`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.clients.conftest import DIGITS, Site
from tests.ports import free_port

pytestmark = [pytest.mark.home_assistant, pytest.mark.slow]

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "clients" / "home-assistant.yaml"
# It starts in two seconds, and waits for integrations that do not come.
START_LIMIT_S = 120
CAMERA = """#!/bin/sh
printf '%s' '{"outputs": [{"name": "labels", "data": ["anna", "ben"]}]}'
"""


def configuration(folder: str, port: int) -> dict[str, Any]:
    """The recipe, for the example model; its sensors' values come over MQTT, and its results go there."""
    written: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    ask = written["automation"][0]["actions"][0]["data"]
    pixels = ", ".join(["1"] * 61)
    for theirs, ours in (
        ('"name": "x"', '"name": "image"'),
        ('"shape": [1, 3]', '"shape": [1, 1, 8, 8]'),
        ('states("sensor.flow")', f'{pixels}, states("sensor.flow")'),
    ):
        assert theirs in ask["payload"]
        ask["payload"] = ask["payload"].replace(theirs, ours)
    ask["topic"] = ask["topic"].replace("heating", "digits")
    for name in ("Flow", "Return", "Outside"):
        written["mqtt"].append({"sensor": {"name": name, "state_topic": f"house/{name.lower()}"}})
    said = {"topic": "house/heating", "payload": "{{ states('sensor.heating') }}"}
    written["automation"].append(
        {
            "alias": "Tell",
            "triggers": [{"trigger": "state", "entity_id": "sensor.heating"}],
            "actions": [{"action": "mqtt.publish", "data": said}],
        }
    )
    # There is no camera: the script begins with the picture's answer.
    who = written["script"]["who_is_there"]["sequence"]
    assert who[0]["action"] == "camera.snapshot"
    tell = {"topic": "house/door", "payload": who[-1]["data"]["message"]}
    who[:] = [who[1], {"action": "mqtt.publish", "data": tell}]
    commands = written["shell_command"]
    assert "sh /config/mosquitto.sh" in commands["ask_faces"]
    commands["ask_faces"] = commands["ask_faces"].replace("/config/", f"{folder}/")
    written["automation"].append(
        {
            "alias": "Door",
            "triggers": [{"trigger": "mqtt", "topic": "house/bell"}],
            "actions": [{"action": "script.who_is_there"}],
        }
    )
    written["homeassistant"] = {"name": "Test", "time_zone": "UTC", "unit_system": "metric"}
    written["http"] = {"server_host": "127.0.0.1", "server_port": port}
    return written


def broker_entry(port: int) -> dict[str, Any]:
    """What Home Assistant keeps when somebody adds the broker in its page."""
    made = "2026-01-01T00:00:00+00:00"
    entry = {
        "created_at": made, "modified_at": made, "entry_id": "01JTEST0000000000000000000", "domain": "mqtt",
        "title": "broker", "source": "user", "version": 1, "minor_version": 2, "unique_id": None,
        "options": {},
        "data": {"broker": "127.0.0.1", "port": port, "username": "homeassistant", "discovery": False},
        "disabled_by": None, "discovery_keys": {}, "subentries": [],
        "pref_disable_new_entities": False, "pref_disable_polling": False,
    }  # fmt: skip
    return {"version": 1, "minor_version": 5, "key": "core.config_entries", "data": {"entries": [entry]}}


def test_home_assistant_asks_a_model(site: Site) -> None:
    root = os.environ.get("EDGEBUNDLE_HOME_ASSISTANT")
    assert root, "make test-home sets EDGEBUNDLE_HOME_ASSISTANT"
    folder = Path(tempfile.mkdtemp(prefix="config-", dir=Path(root) / "tmp"))
    (folder / ".storage").mkdir()
    (folder / "configuration.yaml").write_text(
        yaml.safe_dump(configuration(f"/tmp/{folder.name}", free_port()))
    )
    (folder / ".storage" / "core.config_entries").write_text(json.dumps(broker_entry(site.port)))
    script = folder / "mosquitto.sh"
    script.write_text(CAMERA)
    said: dict[str, str] = {}
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: said.update({message.topic: message.payload.decode()})
    client.connect("127.0.0.1", site.port)
    client.subscribe("house/heating")
    client.subscribe("house/door")
    command = ["chroot", root, "/ha/bin/hass", "-c", f"/tmp/{folder.name}", "--skip-pip"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        )
    try:
        end = time.monotonic() + START_LIMIT_S
        # It may not listen yet: the house goes on.
        for step in range(10_000):
            if {"house/heating", "house/door"} <= said.keys():
                break
            assert time.monotonic() < end, log.read_text()[-4000:]
            assert process.poll() is None, log.read_text()[-4000:]
            if step % 20 == 0:
                for name in ("flow", "return", "outside"):
                    client.publish(f"house/{name}", str(step % 7))
                client.publish("house/bell", "1")
            client.loop(0.1)
    finally:
        process.terminate()
        process.wait(60)
        client.disconnect()
        text = log.read_text()
        shutil.rmtree(folder)
    assert said["house/heating"] in (DIGITS / "labels.txt").read_text().split(), text
    assert said["house/door"] == "anna, ben"
    assert " ERROR " not in text
