"""The JavaScript client in Node over TCP and over WebSockets, and in a real browser."""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import edgebundle
from agent.mqtt.message import Message
from tests.clients.conftest import DIGITS, Site
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import TOP, Reply, Responder
from tests.needs import needed
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "javascript"
MQTT = "mqtt@5.16.0"
PAGE = """<!doctype html><meta charset="utf-8"><title>test</title>
<script type="importmap">{"imports": {"mqtt": "/mqtt.js"}}</script>
<script type="module">
  let result;
  try {
    const library = await import("/edgebundle.js");
    const { run } = await import("/scenario.js");
    const seven = new Uint8Array(await (await fetch("/seven.png")).arrayBuffer());
    result = await run(library, URL_OF_BROKER, {}, seven);
  } catch (error) {
    result = { failed: String(error.stack) };
  }
  await fetch("/result", { method: "POST", body: JSON.stringify(result) });
</script>
"""
MAIN = """
import { readFile } from "node:fs/promises";
import * as library from "./edgebundle.js";
import { run } from "./scenario.js";
const [url, options, picture] = process.argv.slice(2);
console.log(JSON.stringify(await run(library, url, JSON.parse(options), await readFile(picture))));
"""


@pytest.fixture
def folder(tmp_path: Path, npm: Callable[[str], Path]) -> Path:
    """A program of Node that has the library and mqtt."""
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(MAIN)
    for file in (LIBRARY / "edgebundle.js", Path(__file__).with_name("scenario.js")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def node(folder: Path, *arguments: str | Path) -> str:
    done = subprocess.run(
        [needed("node", "nodejs"), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(
    result: dict[str, Any],
    *,
    has_timing: bool = True,
    models: str = "digits",
    groups: str = "the broker knows no group",
) -> None:
    assert "failed" not in result, result["failed"]
    assert result["labels"][0]["label"] == "seven"
    assert result["labels"][0]["score"] > 0.5
    assert result["labels"][0]["index"] == 7
    assert len(result["labels"]) == 3
    assert result["version"] == "1.0.0"
    assert result["raw"] == ["logits"]
    total, *parts = result["timing"]
    assert 0 < total < 30
    assert (None not in parts) == has_timing
    if has_timing:
        assert sum(parts) == pytest.approx(total)
    assert result["input"]["datatype"] == "FP32"
    assert len(result["indices"]) == 3
    assert result["agents"] == ["kitchen", "odd"]
    assert result["unlisted"] == []
    cat = {"label": "cat", "score": 0.75, "index": 3, "x0": 1, "y0": 2, "x1": 3, "y1": 4}
    dog = {"label": "dog", "score": 0.5, "index": 4, "x0": 5, "y0": 6, "x1": 7, "y1": 8}
    assert result["boxes"] == [cat, dog]
    assert result["echo"] == [5, 1, 2, 3, 4, 5]
    assert result["trace"]["traceparent"].startswith("00-0af")
    assert result["order"] == list(range(12))
    assert result["together"] == [1, 2, 3]
    assert result["twice"] == ["1.0.0"] * 3
    errors = result["errors"]
    for name, (kind, words, status) in {
        "agent": ("UnknownAgentError", "use one of the agents at this broker: kitchen, odd", None),
        "group": ("UnknownAgentError", groups, None),
        "model": ("UnknownModelError", f"use one of the models of kitchen: {models}", 404),
        "shape": ("InputError", "", 400),
        "silent": ("NoAnswerError", " s: it is online", None),
        "bad": ("BadAnswerError", "the answer of odd cannot be read", None),
        "status": ("PayloadError", "too much (send less)", 413),
        "abort": ("AbortError", "", None),
        "text": ("UsageError", "expected a JPEG or PNG", None),
        "nothing": ("UsageError", "expected a picture or tensors", None),
        "raw": ("UsageError", "raw: expected true or false, got 1", None),
        "count": ("UsageError", "expected 2 values for shape [2], got 3", None),
        "name": ("UsageError", "expected the names of an agent and a model", None),
        "unreachable": ("BrokerError", "cannot reach the broker at ws://127.0.0.1:1", None),
        "url": ("UsageError", "expected the URL of a broker", None),
    }.items():
        found_kind, message, found_status, _ = errors[name]
        assert (found_kind, found_status) == (kind, status), errors[name]
        assert words in message, errors[name]
    assert errors["agent"][3] < 8000
    assert result["closed"] == ["ClosedError", "ClosedError"]


@pytest.mark.parametrize("scheme", ["mqtt", "ws", "mqtts", "wss"])
def test_node(site: Site, folder: Path, scheme: str) -> None:
    options = json.dumps({"ca": site.authority} if scheme in ("mqtts", "wss") else {})
    check(json.loads(node(folder, "main.js", site.url_of(scheme), options, DIGITS / "seven.png")))


def test_node_names_its_user_in_the_topic(site: Site, folder: Path) -> None:
    (folder / "users.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "const [url, image] = process.argv.slice(2);\n"
        "const named = url.replace('//', '//alice@');\n"
        "const users = [[named], [url, { username: 'a@b.org' }], [url, { username: 'a b' }], [url]];\n"
        "for (const [place, options] of users) {\n"
        "  const client = new Client(place, { ...options, mqttVersion: '3.1.1' });\n"
        "  console.log((await client.model('kitchen', 'digits')({ image })).labels[0].label);\n"
        "  await client.close();\n"
        "}\n"
    )
    topics: list[str] = []
    watcher = paho.Client(CallbackAPIVersion.VERSION2)
    watcher.on_message = lambda _client, _data, message: topics.append(message.topic)
    subscribed = threading.Event()
    watcher.on_subscribe = lambda *_: subscribed.set()
    watcher.connect("127.0.0.1", site.port)
    watcher.subscribe("edge/v1/kitchen/models/digits/infer/#", 1)
    watcher.loop_start()
    try:
        assert subscribed.wait(PATIENCE_S)
        assert node(folder, "users.js", site.url, DIGITS / "seven.png").split() == ["seven"] * 4
    finally:
        watcher.disconnect()
        watcher.loop_stop()
    # A name that cannot be a level of a topic is none.
    asked = [topic.removeprefix("edge/v1/kitchen/models/digits/infer") for topic in topics]
    assert list(dict.fromkeys(asked)) == ["/alice", "/a@b.org", ""]


@pytest.mark.parametrize("scheme", ["mqtts", "wss"])
def test_node_does_not_trust_every_certificate(site: Site, folder: Path, scheme: str) -> None:
    (folder / "stranger.js").write_text(
        'import { BrokerError, Client } from "./edgebundle.js";\n'
        "const error = await new Client(process.argv[2]).connect().catch((error) => error);\n"
        "console.log(error instanceof BrokerError, error.message);\n"
        "process.exit();\n"
    )
    said = node(folder, "stranger.js", site.url_of(scheme))
    assert said.startswith("true cannot reach the broker at")
    assert "certificate" in said


def test_three_lines_of_node(site: Site, folder: Path) -> None:
    """The program of docs/clients.md, with this broker and this model."""
    page = (ROOT / "docs" / "clients.md").read_text()
    program = re.findall(r"```js\n(import \{ Client \}.*?)```", page, re.DOTALL)[0]
    for theirs, ours in (
        ("mqtt://broker", site.url),
        ('"faces"', '"digits"'),
        ('"edgebundle"', '"./edgebundle.js"'),
        ("cat.jpg", str(DIGITS / "seven.png")),
        (".boxes", ".labels"),
    ):
        assert theirs in program
        program = program.replace(theirs, ours)
    (folder / "three.js").write_text(program + "process.exit();\n")
    assert "label: 'seven'" in node(folder, "three.js")


def test_node_without_mqtt_5(site: Site, folder: Path) -> None:
    (folder / "old.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "const client = new Client(process.argv[2], { mqttVersion: '3.1.1' });\n"
        'const model = client.model("kitchen", "digits");\n'
        "const picture = await model({ image: process.argv[3] });\n"
        "const { inputs } = await model.info();\n"
        "const data = new Float32Array(inputs[0].shape.reduce((a, b) => a * b, 1));\n"
        "const tensors = { [inputs[0].name]: { shape: inputs[0].shape, data } };\n"
        "const answer = await model({ tensors });\n"
        "const raw = await model({ tensors }, { raw: true });\n"
        "const names = [...raw.outputs.keys()];\n"
        "console.log(JSON.stringify([picture.labels[0], answer.labels.length, names]));\n"
        "await client.close();\n"
    )
    label, count, names = json.loads(node(folder, "old.js", site.url, DIGITS / "seven.png"))
    assert (label["label"], label["index"], count) == ("seven", 7, 3)
    assert names == ["logits"]


async def test_node_while_the_broker_restarts(mosquitto: BrokerProcess, folder: Path) -> None:
    """Two requests under way are sent again, and answered once each."""
    (folder / "restart.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "const lines = [];\n"
        "const client = new Client(process.argv[2], { progress: (line) => lines.push(line) });\n"
        'const model = client.model("kitchen", "digits");\n'
        "const image = Uint8Array.from([0xff, 0xd8, 0xff]);\n"
        "const answers = await Promise.all([model({ image }), model({ image })]);\n"
        "const last = await model({ image });\n"
        "const row = ({ attempts, labels }) => [attempts, labels.length];\n"
        "console.log(JSON.stringify([...answers, last].map(row)));\n"
        "console.log(lines[0]);\n"
        "await client.close();\n"
    )
    async with Responder(mosquitto, lambda count, _message: (200, TOP) if count > 2 else None) as responder:
        running = asyncio.create_task(asyncio.to_thread(node, folder, "restart.js", mosquitto.url))
        await until(lambda: len(responder.requests) == 2)
        await asyncio.to_thread(mosquitto.restart)
        answers, line = (await running).splitlines()
    first, second, last = json.loads(answers)
    assert first[0] >= 2
    assert second[0] >= 2
    assert (first[1], second[1], last) == (2, 2, [1, 2])
    assert "connecting again" in line


async def test_rows_of_node(mosquitto: BrokerProcess, folder: Path) -> None:
    """The request of a row is that of Python, and what no row has is said before anything is sent."""
    (folder / "rows.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "const client = new Client(process.argv[2]);\n"
        'const model = client.model("kitchen", "digits");\n'
        "await model({ row: { light: 0.3, open: true, room: 'hall', dust: NaN, id: null } });\n"
        "await model({ row: [1, undefined, 2.5] });\n"
        "await model({ row: new Map([['light', 0.5]]) });\n"
        "await model({ row: Float64Array.of(1, NaN) });\n"
        "const view = new DataView(new ArrayBuffer(1));\n"
        "for (const row of [null, 7, 'a', view, { a: Infinity }, { a: [1] }, { a: 1n }])\n"
        "  await model({ row }).catch((error) => console.log(error.name, error.message));\n"
        "const several = { row: [1], image: 'cat.jpg' };\n"
        "await model(several).catch((error) => console.log(error.name, error.message));\n"
        "console.log((await model.info()).columns.length);\n"
        "await client.close();\n"
    )
    async with Responder(mosquitto, lambda _count, _message: (200, TOP)) as responder:
        said = (await asyncio.to_thread(node, folder, "rows.js", mosquitto.url)).splitlines()
    rows = [json.loads(request.payload)["row"] for request in responder.requests]
    assert rows == [
        {"light": 0.3, "open": True, "room": "hall", "dust": None, "id": None},
        [1, None, 2.5],
        {"light": 0.5},
        [1, None],
    ]
    assert [line.partition(" ")[0] for line in said[:-1]] == ["UsageError"] * 8
    assert "a row: expected an object or an array of values" in said[0]
    assert "expected a finite number, got Infinity" in said[4]
    assert "expected a number, a truth value or a text" in said[5]
    assert "expected one kind of input, got image and row" in said[7]
    assert said[-1] == "0"


HOSTILE = """
import { Client } from "./edgebundle.js";
const client = new Client(process.argv[2]);
const said = (error) => `${error.name} ${error.message}`;
const ask = (model, deadlineS) => model({ row: [1] }, { deadlineS }).then(() => "answered", said);
const model = client.model("kitchen", "digits");
for (let count = 0; count < Number(process.argv[3]); count += 1) console.log(await ask(model, 30));
console.log(await ask(model, 2));
console.log(await ask(client.groupModel("none", "digits"), 4));
console.log(JSON.stringify(Object.values(await model.info()).map(String)));
await client.close();
"""
ODD = {"toString": 1, "valueOf": 1}


async def test_node_and_an_agent_that_lies(mosquitto: BrokerProcess, folder: Path) -> None:
    """Answers that take long to read, or are of other types, are errors; such documents count as empty."""
    (folder / "hostile.js").write_text(HOSTILE)
    tensor: dict[str, Any] = {"name": "x", "datatype": "INT64", "shape": [1], "data": [1]}
    replies: dict[str, tuple[int, dict[str, Any]] | tuple[list[str], bytes]] = {
        "expected at most 1048576 values in JSON": (200, {"outputs": [0] * ((1 << 20) + 1)}),
        "expected at most 262144 texts": (["x;BYTES;300000"], bytes(1_200_000)),
        'values of "x"': (200, {"outputs": [{**tensor, "data": ["9" * 1_000_000]}]}),
        "a name, a shape and data": (200, {"outputs": [{**tensor, "name": ODD}]}),
        "an array, got 7": (200, {"outputs": 7}),
        "a name, a shape": (200, {"outputs": [None]}),
    }
    state = {"name": "digits", "version": ODD, "state": ODD, "message": [ODD], "inputs": ODD}
    presence = json.dumps({"state": ODD}).encode()

    def reply(count: int, _message: Message) -> Reply:
        return list(replies.values())[count - 1] if count <= len(replies) else None

    async with Responder(mosquitto, reply, state=state, presence=presence) as responder:
        info = json.dumps({"capabilities": {"groups": [ODD, None, 7, "hall"]}}).encode()
        await responder.connection.publish("edge/v1/kitchen/info", info, retain=True)
        said = await asyncio.to_thread(node, folder, "hostile.js", mosquitto.url, str(len(replies)))
    *answers, silent, group, known = said.splitlines()
    for words, answer in zip(replies, answers, strict=True):
        assert answer.startswith("BadAnswerError the answer of kitchen cannot be read: ")
        assert words in answer
    assert silent.startswith("NoAnswerError no answer from kitchen within 2.0 s: kitchen is unknown")
    assert group.startswith("UnknownAgentError")
    assert "groups at this broker: hall" in group
    assert json.loads(known)[:5] == ["kitchen", "digits", "", "", ""]


async def test_node_and_a_broker_that_answers_no_subscription(folder: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x20\x03\x00\x00\x00")
        while await reader.read(1000):
            pass

    (folder / "silent.js").write_text(
        'import { Client } from "./edgebundle.js";\n'
        "await new Client(process.argv[2]).connect().catch((error) => console.log(error.message));\n"
        "process.exit();\n"
    )
    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        url = f"mqtt://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert "cannot reach the broker" in await asyncio.to_thread(node, folder, "silent.js", url)


def test_chromium(site: Site, folder: Path, tmp_path: Path) -> None:
    browser = needed("chromium", "chromium-browser", "google-chrome")
    arrived = threading.Event()
    results: list[dict[str, Any]] = []
    page = PAGE.replace("URL_OF_BROKER", json.dumps(site.url_of("ws")))
    files: dict[str, tuple[str, bytes]] = {
        "/": ("text/html", page.encode()),
        "/edgebundle.js": ("text/javascript", (folder / "edgebundle.js").read_bytes()),
        "/scenario.js": ("text/javascript", (folder / "scenario.js").read_bytes()),
        "/mqtt.js": ("text/javascript", (folder / "node_modules/mqtt/dist/mqtt.esm.js").read_bytes()),
        "/seven.png": ("image/png", (DIGITS / "seven.png").read_bytes()),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = files.get(self.path, ("text/plain", b""))
            self.send_response(200 if self.path in files else 404)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            results.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            arrived.set()

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    process = subprocess.Popen(
        [browser, *flags, f"http://127.0.0.1:{server.server_port}/"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert arrived.wait(PATIENCE_S), "the page reported nothing"
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        server.shutdown()
        server.server_close()
    check(results[0])


def test_types_and_errors_are_those_of_the_library() -> None:
    source = (LIBRARY / "edgebundle.js").read_text()
    types = (LIBRARY / "edgebundle.d.ts").read_text()
    exported = re.compile(r"^export class (\w+)(?: extends (\w+))?", re.MULTILINE)
    assert dict(exported.findall(source)) == dict(exported.findall(types))
    names = set(edgebundle.__all__)
    assert {name for name, _ in exported.findall(source)} <= names
    assert {name for name in names if name.endswith("Error")} <= {
        name for name, _ in exported.findall(source)
    }
    package = json.loads((LIBRARY / "package.json").read_text())
    assert package["version"] == __import__("agent").__version__
