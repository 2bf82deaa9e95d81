"""The recipes of docs/clients.md and docs/rows.md do what they say, with the programs that they are for.

At a broker where anybody may do anything, and at one with TLS, passwords and the sample access list.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
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

from tests.clients.conftest import DIGITS, Site, password_of
from tests.needs import needed
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "clients"
DOCS = RECIPES.parents[1] / "docs"
NODE_RED = "node-red@4.1.8"
SEVEN = DIGITS / "seven.png"
# What docs/rows.md calls a model and its columns, and a row of it, and what they are here.
OF_ROWS = (
    ("forest", "heating"), ("temperature", "flow"), ("humidity", "return"), ("light", "outside"),
    ("21.5", "41.5"), ("40", "30"), ("0.3", "4"),
)  # fmt: skip


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(command),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **environment},
    )


def tls_options(site: Site) -> list[str]:
    """Return how mosquitto's programs reach a broker with users."""
    place = ["-h", "127.0.0.1", "-p", str(site.ports["mqtts"]), "--cafile", str(site.folder / "ca.pem")]
    return [*place, "-u", "alice", "-P", password_of("alice")]


@pytest.fixture(params=["house", "guarded"])
def place(request: pytest.FixtureRequest) -> Site:
    """A broker where anybody may do anything, and one with users."""
    site = request.getfixturevalue(request.param)
    assert isinstance(site, Site)
    return site


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """Return a text of the documentation with this broker and this model; no change sees another's."""
    ours = dict(changes)
    assert all(theirs in text for theirs in ours), text
    return re.sub("|".join(map(re.escape, ours)), lambda found: ours[found[0]], text)


def labels(answer: str) -> list[str]:
    outputs = {output["name"]: output["data"] for output in json.loads(answer)["outputs"]}
    return list(outputs["labels"])


def test_mosquitto_pub_and_sub(place: Site) -> None:
    needed("mosquitto_pub")
    ask = (RECIPES / "mosquitto.sh", "kitchen", "digits")
    options, user = ["-h", "127.0.0.1", "-p", str(place.port)], ""
    if place.has_users:
        options, user = tls_options(place), "alice"
    done = run(*ask, SEVEN, *options, EDGEBUNDLE_USER=user)
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout)[0] == "seven"
    refused = run(*ask, RECIPES / "infer.c", *options, EDGEBUNDLE_USER=user)
    assert "error" in json.loads(refused.stdout)
    assert run(*ask).returncode == 2


# The first of a page's commands is for a broker without users.
@pytest.mark.parametrize("page", ["clients.md", "rows.md"])
def test_mosquitto_rr(place: Site, page: str) -> None:
    """The commands of the documentation, with this broker and this model."""
    needed("mosquitto_rr")
    commands = re.findall(r"^(mosquitto_rr .*?[^\\])\n", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(commands) == 2
    command = commands[place.has_users]
    changes = [("PASSWORD", f"'{password_of('alice')}'"), ("ca.pem", str(place.folder / "ca.pem"))]
    changes.append(("-h broker.lan -p 8883", f"-h 127.0.0.1 -p {place.ports['mqtts']}"))
    if not place.has_users:
        changes = [(" -t ", f" -h 127.0.0.1 -p {place.port} -t ")]
        command = command.replace(" -h broker", "")
    if page == "rows.md":
        changes += OF_ROWS
    else:
        changes += [("heating", "digits"), ('"name": "x"', '"name": "image"'), ("[1, 3]", "[1, 1, 8, 8]")]
        changes.append(("[20.5, 31, 4]", json.dumps([0.0] * 64)))
    done = run("bash", "-c", replaced(command, *changes))
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout) == ["heating"] if page == "rows.md" else len(labels(done.stdout)) == 3


def test_mosquitto_rr_asks_a_group(guarded: Site) -> None:
    needed("mosquitto_rr")
    command = ["mosquitto_rr", "-V", "mqttv5", "-W", "30", *tls_options(guarded)]
    command += ["-t", "edge/v1/groups/door/models/heating/infer/alice", "-e", "edge/v1/replies/alice/door/1"]
    done = run(*command, "-m", json.dumps({"flow": 41.5, "return": 30, "outside": 4}))
    assert labels(done.stdout) == ["heating"], done.stderr


def test_program_of_the_page_on_rows(guarded: Site, tmp_path: Path) -> None:
    """The program of docs/rows.md, as somebody with a user name writes it."""
    [program] = re.findall(r"```\n(from edgebundle .*?)```", (DOCS / "rows.md").read_text(), re.DOTALL)
    broker = guarded.seen_by("alice")
    seen = f'"{broker.url}", cafile="{broker.cafile}", password_file="{broker.password_file}"'
    (tmp_path / "row.py").write_text(replaced(program, ('"mqtt://localhost"', seen), *OF_ROWS))
    done = run(sys.executable, tmp_path / "row.py", PYTHONPATH=str(DOCS.parent))
    assert done.stdout == "heating\n", done.stderr


def test_c(site: Site, guarded: Site, tmp_path: Path) -> None:
    program = tmp_path / "infer"
    flags = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wconversion", "-Werror")
    made = run(needed("cc", "gcc"), *flags, "-o", program, RECIPES / "infer.c", "-lmosquitto")
    assert made.returncode == 0, made.stderr
    done = run(program, "127.0.0.1", str(site.port), "kitchen", "digits", SEVEN)
    assert done.returncode == 0, done.stderr
    assert labels(done.stdout)[0] == "seven"
    secure = {"MQTT_CAFILE": str(guarded.folder / "ca.pem"), "MQTT_PASSWORD": password_of("alice")}
    named = (str(guarded.ports["mqtts"]), "kitchen", "digits", SEVEN, "alice")
    done = run(program, "127.0.0.1", *named, **secure)
    assert labels(done.stdout)[0] == "seven", done.stderr
    assert run(program, "127.0.0.1", *named, MQTT_PASSWORD=password_of("alice")).returncode == 4
    wrong = run(program, "127.0.0.1", str(site.port), "kitchen", "digit", SEVEN)
    assert (wrong.returncode, "error" in json.loads(wrong.stdout)) == (4, True)
    assert run(program, "127.0.0.1", "1", "kitchen", "digits", SEVEN).returncode == 4
    assert run(program, "127.0.0.1", "1", "kitchen", "digits", tmp_path / "none").returncode == 4


def test_node_red(place: Site, tmp_path: Path, npm: Callable[[str], Path]) -> None:
    red = npm(NODE_RED) / "node-red" / "red.js"
    flow: list[dict[str, Any]] = json.loads((RECIPES / "node-red.json").read_text())
    nodes = {node["id"]: node for node in flow}
    nodes["edgebundle-broker"] |= {"broker": "127.0.0.1", "port": str(place.port)}
    if place.has_users:
        nodes["edgebundle-broker"] |= {"port": str(place.ports["mqtts"]), "usetls": True, "tls": "tls"}
        authority = str(place.folder / "ca.pem")
        empty = {"cert": "", "key": "", "certname": "", "keyname": "", "caname": "", "servername": ""}
        flow.append({"id": "tls", "type": "tls-config", "ca": authority, "verifyservercert": True, **empty})
        named = replaced(nodes["request"]["func"], ("const user = ''", "const user = 'alice'"))
        nodes["request"]["func"] = named
        nodes["answers"]["topic"] = replaced(nodes["answers"]["topic"], ("anonymous", "alice"))
        secret = {"edgebundle-broker": {"user": "alice", "password": password_of("alice")}}
        (tmp_path / "flows_cred.json").write_text(json.dumps(secret))
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
        " uiHost: '127.0.0.1', telemetry: {enabled: false}, credentialSecret: false,"
        " externalModules: {autoInstall: false}};"
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


def answered(
    guarded: Site, action: dict[str, Any], topic: str, rendered: str, sensor: dict[str, Any]
) -> bytes:
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
    client.username_pw_set("homeassistant", password_of("homeassistant"))
    client.connect("127.0.0.1", guarded.port)
    end = time.monotonic() + 20
    while not answers and time.monotonic() < end:
        client.loop(0.1)
    client.disconnect()
    return answers[0]


def test_home_assistant(guarded: Site) -> None:
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
        answer = answered(guarded, action, topic, rendered, sensors[place])
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
