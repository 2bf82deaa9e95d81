"""Outputs whose length is only known at run time, from the bundle to the clients: cut to their counts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import onnx
import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from builder.bundles.package import Package
from builder.compiler import compile
from builder.compiling.identity import Identity
from builder.importer import import_onnx
from edgebundle import Client
from tests.clients.conftest import Site, deploy, run_site
from tests.clients.test_javascript import LIBRARY, MQTT
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow

COLUMNS = 4
# Rows whose first number is above 0.5, and where they are; the largest is an output of fixed shape.
ROWS = """<ir_version: 8, opset_import: ["" : 17]> g (float[6,4] x)
=> (float[n,4] rows, int64[2,m] places, float[4] largest) {
    half = Constant<value = float {0.5}>() zero = Constant<value = int64 {0}>()
    first = Gather<axis = 1>(x, zero) chosen = Greater(first, half)
    rows = Compress<axis = 0>(x, chosen) above = Greater(x, half) places = NonZero(above)
    largest = ReduceMax<axes = [0], keepdims = 0>(x)
}"""
# A graph whose count is whatever the client sends, as that of a faulty kernel might be.
FAULTY = """<ir_version: 8, opset_import: ["" : 17]> g (float[5] x, int64[1] n)
=> (float[5] y, int64[1] length) { y = Relu(x) length = Identity(n) }"""
MAIN = """
import { Client } from "./edgebundle.js";
const client = new Client(process.argv[2]);
const model = client.model("kitchen", "rows");
const results = [];
for (const values of JSON.parse(process.argv[3])) {
  const { outputs } = await model({ tensors: { x: { shape: [6, 4], data: Float32Array.from(values) } } });
  const [rows, places] = [outputs.get("rows"), outputs.get("places")];
  results.push([[...outputs.keys()], rows.shape, Array.from(rows.data), places.shape]);
}
const info = await model.info();
await client.close();
console.log(JSON.stringify({ results, outputs: info.outputs }));
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path) -> Iterator[Site]:
    """One of its own, with the models `rows` and `faulty`."""
    for site in run_site(tmp_path_factory.mktemp("lengths"), digits_bundle):
        deploy(site, _rows(), "rows")
        deploy(site, _faulty(), "faulty")
        yield site


def _rows() -> Package:
    return compile(import_onnx(onnx.parser.parse_model(ROWS)), identity=Identity("rows"))


def _faulty() -> Package:
    model = onnx.parser.parse_model(FAULTY)
    # The name by which the importer marks a count.
    model.graph.node[1].output[0] = model.graph.output[1].name = "edgebundle/length/0/y"
    # Not judged by the file, whose y has no length.
    return compile(replace(import_onnx(model), original=None), identity=Identity("faulty"))


def samples() -> list[np.ndarray]:
    """Six rows, of which some, all, and none are chosen."""
    some = np.random.default_rng(3).random((6, COLUMNS)).astype(np.float32)
    return [some, np.full((6, COLUMNS), 0.75, np.float32), np.zeros((6, COLUMNS), np.float32)]


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x[x[:, 0] > 0.5], np.stack(np.nonzero(x > 0.5))


def test_python(site: Site) -> None:
    with Client(site.url) as client:
        model = client.model("kitchen", "rows")
        info = model.info()
        assert [spec.name for spec in info.outputs] == ["rows", "places", "largest"]
        assert [spec.shape for spec in info.outputs] == [(6, COLUMNS), (2, 24), (COLUMNS,)]
        assert info.smallest_outputs == ((0, COLUMNS), (2, 0), (COLUMNS,))
        for x in samples():
            answer = model(x)
            rows, places = expected(x)
            assert list(answer) == ["rows", "places", "largest"]
            assert answer["rows"].shape == rows.shape
            assert np.array_equal(answer["rows"], rows)
            assert answer["places"].dtype == np.int64
            assert np.array_equal(answer["places"], places)
            assert np.array_equal(answer["largest"], x.max(axis=0))


@pytest.mark.parametrize(
    ("count", "kept"), [(0, 0), (3, 3), (5, 5), (6, 5), (-1, 0), (2**63 - 1, 5), (-(2**63), 0)]
)
def test_a_count_beyond_its_capacity_stays_bounded(site: Site, count: int, kept: int) -> None:
    x = np.arange(5, dtype=np.float32)
    with Client(site.url) as client:
        answer = client.model("kitchen", "faulty")({"x": x, "n": np.array([count])})
        assert list(answer) == ["y"]
        assert np.array_equal(answer["y"], x[:kept])


def test_a_foreign_client_with_json(site: Site) -> None:
    """MQTT 3.1.1 and plain JSON, as any client can write it."""
    answers: Queue[dict[str, Any]] = Queue()
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: answers.put(json.loads(message.payload))
    client.connect("127.0.0.1", site.port)
    client.loop_start()
    try:
        client.subscribe("edge/v1/replies/me/lengths")
        for x in samples():
            tensor = {"name": "x", "datatype": "FP32", "shape": [6, COLUMNS], "data": x.ravel().tolist()}
            request = {"reply_to": "edge/v1/replies/me/lengths", "id": "1", "inputs": [tensor]}
            client.publish("edge/v1/kitchen/models/rows/infer", json.dumps(request), qos=1)
            rows, places, largest = answers.get(timeout=PROGRAM_PATIENCE_S)["outputs"]
            for output, wanted in zip((rows, places), expected(x), strict=True):
                assert output["shape"] == list(wanted.shape)
                np.testing.assert_allclose(output["data"], wanted.ravel(), rtol=1e-6)
            assert largest["shape"] == [COLUMNS]
    finally:
        client.loop_stop()


def test_javascript(site: Site, npm: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(MAIN)
    (tmp_path / "edgebundle.js").write_bytes((LIBRARY / "edgebundle.js").read_bytes())
    given = json.dumps([x.ravel().tolist() for x in samples()])
    done = subprocess.run(
        ["node", "main.js", site.url, given],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for x, (names, shape, data, places) in zip(samples(), found["results"], strict=True):
        rows, wanted = expected(x)
        assert names == ["rows", "places", "largest"]
        assert shape == list(rows.shape)
        assert data == rows.ravel().tolist()
        assert places == list(wanted.shape)
    assert found["outputs"][0]["shape"] == [-1, COLUMNS]
