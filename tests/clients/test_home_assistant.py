"""The recipe for Home Assistant in Home Assistant itself, under the sample access list: `make test-home`."""

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

from tests.clients.conftest import DIGITS, Site, password_of
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S
from tests.ports import free_port

pytestmark = [pytest.mark.home_assistant, pytest.mark.slow]

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "clients" / "home-assistant.yaml"
# It starts in two seconds, and waits for integrations that do not come.
# What the sensors of the house begin with.
VALUES = {"flow": 41.5, "return": 30.0, "outside": 4.0, "pressure": 1.0, "current": 2.0, "speed": 3.0}
CAMERA = """#!/bin/sh
printf '%s' '{"outputs": [{"name": "labels", "data": ["anna", "ben"]}]}'
"""


def configuration(folder: str, port: int) -> dict[str, Any]:
    """The recipe, with values and results over MQTT, and with the example model as `pump`."""
    written: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    ask = written["automation"][1]["actions"][0]["data"]
    pixels = ", ".join(["1"] * 61)
    for theirs, ours in (
        ('"name": "x"', '"name": "image"'),
        ('"shape": [1, 3]', '"shape": [1, 1, 8, 8]'),
        ('states("sensor.pressure")', f'{pixels}, states("sensor.pressure")'),
    ):
        assert theirs in ask["payload"]
        ask["payload"] = ask["payload"].replace(theirs, ours)
    ask["topic"] = ask["topic"].replace("pump", "digits")
    for name in VALUES:
        written["mqtt"].append({"sensor": {"name": name.capitalize(), "state_topic": f"house/{name}"}})
    for name in ("heating", "pump"):
        said = {"topic": f"house/{name}", "payload": f"{{{{ states('sensor.{name}') }}}}"}
        written["automation"].append(
            {
                "alias": f"Tell {name}",
                "triggers": [{"trigger": "state", "entity_id": f"sensor.{name}"}],
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
    # An entity that the agent announces.
    ready = {"topic": "house/ready", "payload": "{{ states('binary_sensor.kitchen_digits_ready') }}"}
    written["automation"].append(
        {
            "alias": "Ready",
            "triggers": [{"trigger": "mqtt", "topic": "house/bell"}],
            "actions": [{"action": "mqtt.publish", "data": ready}],
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
        "data": {
            "broker": "127.0.0.1", "port": port, "username": "homeassistant",
            "password": password_of("homeassistant"), "discovery": True,
        },
        "disabled_by": None, "discovery_keys": {}, "subentries": [],
        "pref_disable_new_entities": False, "pref_disable_polling": False,
    }  # fmt: skip
    return {"version": 1, "minor_version": 5, "key": "core.config_entries", "data": {"entries": [entry]}}


def test_home_assistant_asks_models(guarded: Site) -> None:
    root = os.environ.get("EDGEBUNDLE_HOME_ASSISTANT")
    assert root, "make test-home sets EDGEBUNDLE_HOME_ASSISTANT"
    folder = Path(tempfile.mkdtemp(prefix="config-", dir=Path(root) / "tmp"))
    (folder / ".storage").mkdir()
    (folder / "configuration.yaml").write_text(
        yaml.safe_dump(configuration(f"/tmp/{folder.name}", free_port()))
    )
    (folder / ".storage" / "core.config_entries").write_text(json.dumps(broker_entry(guarded.port)))
    script = folder / "mosquitto.sh"
    script.write_text(CAMERA)
    said: dict[str, str] = {}
    labels = (DIGITS / "labels.txt").read_text().split()
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: said.update({message.topic: message.payload.decode()})
    client.username_pw_set("house", password_of("house"))
    client.connect("127.0.0.1", guarded.port)
    for name in ("heating", "pump", "door", "ready"):
        client.subscribe(f"house/{name}")
    command = ["chroot", root, "/ha/bin/hass", "-c", f"/tmp/{folder.name}", "--skip-pip"]
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        )
    try:
        end = time.monotonic() + PROGRAM_PATIENCE_S
        # It may not listen yet: the house goes on.
        for step in range(10_000):
            three = [said.get(f"house/{name}") for name in ("heating", "door", "ready")]
            if three == ["heating", "anna, ben", "on"] and said.get("house/pump") in labels:
                break
            assert time.monotonic() < end, f"{said}\n{log.read_text()[-4000:]}"
            assert process.poll() is None, log.read_text()[-4000:]
            if step % 20 == 0:
                for name, value in VALUES.items():
                    client.publish(f"house/{name}", str(value + step % 7 / 10))
                client.publish("house/bell", "1")
            client.loop(0.1)
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            client.disconnect()
            text = log.read_text()
            shutil.rmtree(folder)
    assert " ERROR " not in text, text[-4000:]
