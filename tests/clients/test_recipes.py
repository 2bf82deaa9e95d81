"""The recipes of docs/clients.md do what they say, with the programs that they are for."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import paho.mqtt.client as paho
import pytest
import yaml
from paho.mqtt.enums import CallbackAPIVersion

from tests.clients.conftest import DIGITS, Site
from tests.needs import needed
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "clients"
PAGE = (RECIPES.parents[1] / "docs" / "clients.md").read_text()
NODE_RED = "node-red@4.1.8"
SEVEN = DIGITS / "seven.png"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(command), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def labels(answer: str) -> list[str]:
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    return list(outputs["labels"])


def test_mosquitto_pub_and_sub(site: Site) -> None:
    needed("mosquitto_pub")
    ask = (RECIPES / "mosquitto.sh", "kitchen", "digits")
    place = ("-h", "127.0.0.1", "-p", str(site.port))
    done = run(*ask, SEVEN, *place)
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout)[0] == "seven"
    refused = run(*ask, RECIPES / "infer.c", *place)
    assert "error" in json.loads(refused.stdout)
    assert run(*ask).returncode == 2


def test_mosquitto_rr(site: Site) -> None:
    """The command of docs/clients.md, with this broker and this model."""
    needed("mosquitto_rr")
    [command] = re.findall(r"^(mosquitto_rr .*?[^\\])\n", PAGE, re.MULTILINE | re.DOTALL)
    for theirs, ours in (
        ("-h broker", f"-h 127.0.0.1 -p {site.port}"),
        ("heating", "digits"),
        ('"name": "x"', '"name": "image"'),
        ("[1, 3]", "[1, 1, 8, 8]"),
        ("[20.5, 31, 4]", json.dumps([0.0] * 64)),
    ):
        assert theirs in command
        command = command.replace(theirs, ours)
    done = run("bash", "-c", command)
    assert done.returncode == 0, done.stderr
    assert len(labels(done.stdout)) == 3


def test_c(site: Site, tmp_path: Path) -> None:
    program = tmp_path / "infer"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror")
    made = run(needed("cc", "gcc"), *flags, "-o", program, RECIPES / "infer.c", "-lmosquitto")
    assert made.returncode == 0, made.stderr
    done = run(program, "127.0.0.1", str(site.port), "kitchen", "digits", SEVEN)
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout)[0] == "seven"
    wrong = run(program, "127.0.0.1", str(site.port), "kitchen", "digit", SEVEN)
    assert (wrong.returncode, "error" in json.loads(wrong.stdout)) == (4, True)
    assert run(program, "127.0.0.1", "1", "kitchen", "digits", SEVEN).returncode == 4
    assert run(program, "127.0.0.1", "1", "kitchen", "digits", tmp_path / "none").returncode == 4


def test_node_red(house: Site, tmp_path: Path, npm: Callable[[str], Path]) -> None:
    red = npm(NODE_RED) / "node-red" / "red.js"
    flow: list[dict[str, Any]] = json.loads((RECIPES / "node-red.json").read_text())
    nodes = {node["id"]: node for node in flow}
    nodes["edgebundle-broker"] |= {"broker": "127.0.0.1", "port": str(house.port)}
    nodes["start"] |= {"once": True, "props": [{"p": "filename", "v": str(SEVEN), "vt": "str"}]}
    nodes["values"] |= {"once": True}
    assert "isPicture ? 'faces' : 'heating'" in nodes["request"]["func"]
    nodes["request"]["func"] = nodes["request"]["func"].replace("'faces'", "'digits'")
    result = tmp_path / "result.json"
    nodes["read"]["wires"] = [["show", "write"]]
    write: dict[str, Any] = {
        "id": "write",
        "type": "file",
        "z": "edgebundle",
        "filename": str(result),
        "filenameType": "str",
    }
    write |= {"appendNewline": True, "createDir": False, "overwriteFile": "false", "encoding": "none"}
    flow.append(write | {"x": 400, "y": 220, "wires": [[]]})
    (tmp_path / "flows.json").write_text(json.dumps(flow))
    (tmp_path / "settings.js").write_text(
        "module.exports = {flowFile: 'flows.json', httpAdminRoot: false, httpNodeRoot: false, uiPort: 0,"
        " uiHost: '127.0.0.1', telemetry: {enabled: false}, externalModules: {autoInstall: false}};"
    )
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [needed("node", "nodejs"), red, "--userDir", tmp_path, "-s", tmp_path / "settings.js"],
            stdout=log,
            stderr=log,
        )
    try:
        end = time.monotonic() + 40
        while not result.exists() or result.read_text().count("]\n") < 2:
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    found = sorted((json.loads(line) for line in result.read_text().splitlines()), key=len)
    [row], picture = found
    assert (row["label"], picture[0]["label"], len(picture)) == ("heating", "seven", 3)
    assert min(row["score"], picture[0]["score"]) > 0.5


def answered(site: Site, action: dict[str, Any], topic: str, rendered: str, sensor: dict[str, Any]) -> bytes:
    """Return what an agent answers to a rendered payload, which names the sensor's topic."""
    assert action["action"] == "mqtt.publish"
    assert json.loads(rendered)["reply_to"] == sensor["state_topic"]
    answers: list[bytes] = []
    client = paho.Client(CallbackAPIVersion.VERSION2)  # MQTT 3.1.1, as Home Assistant's default

    def on_subscribe(*_granted: object) -> None:
        client.publish(topic, rendered, action["data"]["qos"])

    def on_connect(*_accepted: object) -> None:
        client.subscribe(sensor["state_topic"], 1)

    client.on_message = lambda _client, _data, message: answers.append(bytes(message.payload))
    client.on_subscribe = on_subscribe
    client.on_connect = on_connect
    client.connect("127.0.0.1", site.port)
    end = time.monotonic() + 20
    while not answers and time.monotonic() < end:
        client.loop(0.1)
    client.disconnect()
    return answers[0]


def test_home_assistant(house: Site) -> None:
    """Home Assistant's templates are Jinja's: each payload is rendered, sent, and its answer is rendered."""
    configuration = yaml.safe_load((RECIPES / "home-assistant.yaml").read_text())
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters |= {"to_json": json.dumps, "from_json": json.loads}
    moment = SimpleNamespace(timestamp=time.time)
    (row,), (tensor,) = (automation["actions"] for automation in configuration["automation"])
    sensors = [each["sensor"] for each in configuration["mqtt"]]

    def ask(action: dict[str, Any], payload: str, place: int, states: dict[str, str]) -> tuple[bytes, str]:
        template = environment.from_string(payload)
        rendered = template.render(states=states.__getitem__, now=lambda: moment)
        topic = action["data"]["topic"].replace("pump", "digits")
        answer = answered(house, action, topic, rendered, sensors[place])
        value = environment.from_string(sensors[place]["value_template"])
        assert value.render(value_json={"error": "no model"}).strip() == "no model"
        return answer, value.render(value_json=json.loads(answer)).strip()

    states = {"sensor.flow": "41.5", "sensor.return": "30", "sensor.outside": "4"}
    assert ask(row, row["data"]["payload"], 0, states)[1] == "heating"
    assert ask(row, row["data"]["payload"], 0, {**states, "sensor.return": "40"})[1] == "idle"
    unknown = ask(row, row["data"]["payload"], 0, {**states, "sensor.return": "unavailable"})[1]
    assert "return" in unknown, "a sensor without a value is no 0"

    payload = tensor["data"]["payload"]
    pixels = ", ".join(["1"] * 61)
    for theirs, ours in (
        ('"shape": [1, 3]', '"shape": [1, 1, 8, 8]'),
        ('states("sensor.pressure")', f'{pixels}, states("sensor.pressure")'),
        ('"name": "x"', '"name": "image"'),
    ):
        assert theirs in payload
        payload = payload.replace(theirs, ours)
    ones = dict.fromkeys(("sensor.pressure", "sensor.current", "sensor.speed"), "1")
    answer, said = ask(tensor, payload, 1, ones)
    assert said in (DIGITS / "labels.txt").read_text().split()
    notify = configuration["script"]["who_is_there"]["sequence"][-1]["data"]["message"]
    shown = environment.from_string(notify).render(answer=SimpleNamespace(stdout=answer.decode()))
    assert said in shown
    assert "mosquitto.sh" in configuration["shell_command"]["ask_faces"]
