"""A model whose shapes change, from the bundle to the clients: a real agent, broker and worker."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import onnxruntime as ort
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

import edgebundle
from builder import cli
from builder.bundles import key_files
from builder.bundles.package import Package
from tests import changing_models
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

MQTT = "mqtt@5.16.0"
MAIN = """
import { Client } from "./edgebundle.js";
const client = new Client(process.argv[2]);
const model = client.model("kitchen", "model");
const results = [];
for (const n of [3, 16, 1]) {
  const ids = { shape: [1, n], data: BigInt64Array.from({ length: n }, (_, i) => BigInt(i % 11)) };
  const mask = { shape: [1, n], data: BigInt64Array.from({ length: n }, () => 1n) };
  const answer = await model({ tensors: { ids, mask } });
  results.push([answer.outputs.get("tokens").shape, Array.from(answer.outputs.get("first").data)]);
}
let refused = "";
const long = { shape: [1, 17], data: new BigInt64Array(17) };
try { await model({ tensors: { ids: long, mask: long } }); } catch (error) { refused = error.message; }
const { inputs } = await model.info();
await client.close();
console.log(JSON.stringify({ results, refused, inputs }));
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, attention_bundle: Path) -> Iterator[BrokerProcess]:
    """A broker with an agent `kitchen` that serves the model."""
    folder = tmp_path_factory.mktemp("changing")
    pair = key_files.generate(folder / "keys")
    (folder / "keyring").mkdir()
    shutil.copy(pair.public, folder / "keyring" / "test.pub")
    broker = BrokerProcess("mosquitto", folder)
    broker.start()
    batching = "[inference]\nbatch = true\nbatch_delay_s = 0.05\n"
    (folder / "agent.toml").write_text(f'device = "kitchen"\n[broker]\nurl = "{broker.url}"\n{batching}')
    command = [sys.executable, "-m", "agent", "run", "--config", str(folder / "agent.toml")]
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(
            [*command, "--trust", str(folder / "keyring"), "--state-dir", str(folder / "state")],
            stdout=log,
            stderr=log,
        )
    try:
        signed = folder / "model.bundle"
        Package.load(attention_bundle).sign(key_files.read_private(pair.private)).save(signed)
        give_up = time.monotonic() + PROGRAM_PATIENCE_S
        while cli.main(["deploy", str(signed), "--agent", "kitchen", "--broker", broker.url]):
            assert time.monotonic() < give_up, (folder / "agent.log").read_text()
        yield broker
        assert "starting another" not in (folder / "agent.log").read_text()
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(PATIENCE_S)
        broker.stop()


def inputs(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    mask = (rng.random((batch, length)) < 0.7).astype(np.int64)
    mask[:, 0] = 1
    return {"ids": rng.integers(0, changing_models.TOKENS, (batch, length)), "mask": mask}


def expected(given: dict[str, np.ndarray]) -> list[np.ndarray]:
    session = ort.InferenceSession(changing_models.attention().SerializeToString())
    found: list[np.ndarray] = session.run(None, given)
    return found


def test_python(broker: BrokerProcess) -> None:
    with edgebundle.Client(broker.url) as client:
        model = client.model("kitchen", "model")
        info = model.info()
        assert [spec.shape for spec in info.inputs] == [(3, 16), (3, 16)]
        assert info.smallest_inputs == ((1, 1), (1, 1))
        for batch, length in [(1, 1), (3, 16), (2, 5), (1, 16), (3, 4)]:
            given = inputs(batch, length)
            answer = model(given)
            for name, wanted in zip(("tokens", "first"), expected(given), strict=True):
                np.testing.assert_allclose(answer[name], wanted, rtol=1e-4, atol=1e-5)
        assert model({name: array[0] for name, array in inputs(1, 7).items()})["tokens"].shape == (1, 7, 4)
        with pytest.raises(edgebundle.InputError, match=r"sequence must be from 1 to 16"):
            model(inputs(1, 17))
        with pytest.raises(edgebundle.InputError, match="one size of sequence"):
            model({"ids": inputs(1, 3)["ids"], "mask": inputs(1, 4)["mask"]})


def test_requests_that_wait_are_computed_together(broker: BrokerProcess) -> None:
    """Equal to single answers, whatever their sizes; requests that do not fit are refused by themselves."""
    sizes = [(1, 5), (1, 5), (2, 5), (1, 9), (1, 9), (1, 17), (1, 9), (3, 2), (1, 2)] * 4
    given = [inputs(batch, length) for batch, length in sizes]
    with edgebundle.Client(broker.url) as client, ThreadPoolExecutor(len(given)) as pool:
        model = client.model("kitchen", "model")
        futures = [pool.submit(model, each) for each in given]
        for each, future in zip(given, futures, strict=True):
            if each["ids"].shape[1] == 17:
                assert isinstance(future.exception(), edgebundle.InputError)
                continue
            for name, wanted in zip(("tokens", "first"), expected(each), strict=True):
                np.testing.assert_allclose(future.result()[name], wanted, rtol=1e-4, atol=1e-5)


def test_a_foreign_client_with_json(broker: BrokerProcess) -> None:
    """MQTT 3.1.1 and plain JSON, as any client can write it."""
    answers: Queue[dict[str, Any]] = Queue()
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: answers.put(json.loads(message.payload))
    client.connect(broker.host, broker.port)
    client.loop_start()
    try:
        client.subscribe("edge/v1/replies/me/kitchen")
        for length in (2, 9, 0, 17):
            given = inputs(1, length) if length else {"ids": np.zeros((1, 0)), "mask": np.zeros((1, 0))}
            tensors = [
                {"name": name, "datatype": "INT64", "shape": list(a.shape), "data": a.ravel().tolist()}
                for name, a in given.items()
            ]
            request = {"reply_to": "edge/v1/replies/me/kitchen", "id": str(length), "inputs": tensors}
            client.publish("edge/v1/kitchen/models/model/infer", json.dumps(request), qos=1)
            answer = answers.get(timeout=PROGRAM_PATIENCE_S)
            if length not in (2, 9):
                assert answer["status"] == 400
                assert "from 1 to 16" in str(answer["message"])
                continue
            outputs = answer["outputs"]
            assert outputs[0]["shape"] == [1, length, 4]
            np.testing.assert_allclose(outputs[1]["data"], expected(given)[1].ravel(), rtol=1e-4, atol=1e-5)
    finally:
        client.loop_stop()


def test_javascript(broker: BrokerProcess, npm: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(MAIN)
    library = Path(__file__).resolve().parents[2] / "javascript" / "edgebundle.js"
    (tmp_path / "edgebundle.js").write_bytes(library.read_bytes())
    done = subprocess.run(
        ["node", "main.js", broker.url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for length, (shape, first) in zip((3, 16, 1), found["results"], strict=True):
        given = {"ids": np.arange(length)[None] % 11, "mask": np.ones((1, length), np.int64)}
        assert shape == [1, length, 4]
        np.testing.assert_allclose(first, expected(given)[1].ravel(), rtol=1e-4, atol=1e-5)
    assert "from 1 to 16" in found["refused"]
    assert found["inputs"][0] == {
        "name": "ids",
        "datatype": "INT64",
        "shape": [-1, -1],
        "shape_min": [1, 1],
        "shape_max": [3, 16],
    }
