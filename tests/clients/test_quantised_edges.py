"""Integers with a scale at the edges: `run`, a device, the clients and the dashboard agree on the numbers."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from builder.bundles.package import Package
from builder.compiler import compile
from builder.compiling.identity import Identity
from builder.compiling.options import Options
from builder.running.local_run import run
from dashboard.server import Dashboard
from edgebundle import Client
from edgebundle.broker import Broker
from tests.cli.test_quantised_edges import COLOUR, means
from tests.clients.conftest import Site, deploy, run_site
from tests.clients.test_javascript import LIBRARY, MQTT
from tests.dashboard.test_server import ask
from tests.needs import needed
from tests.patience import PATIENCE_S, until

pytestmark = pytest.mark.slow

# An odd zero point; in steps of 1/200, the colour's real numbers are not whole.
SCALE, ZERO = 1 / 200, 7
REAL = np.full((1, 8, 8, 3), 0.3, np.float32)
INTEGERS = np.full((1, 8, 8, 3), 90, np.uint8)
CLASSES = np.repeat([[0, 0, 0, 0, 0, 1, 1, 1]], 8, axis=0)
MAIN = """
import { Client } from "./edgebundle.js";
const client = new Client(process.argv[2]);
const model = client.model("kitchen", "means");
const labels = (answer) => answer.labels.map(({ index, score }) => [index, score]);
const shape = [1, 8, 8, 3];
const integers = { tensors: { picture: { shape, data: new Uint8Array(192).fill(90) } } };
const results = {
  picture: labels(await model({ image: process.argv[3] })),
  real: labels(await model({ tensors: { picture: { shape, data: new Float32Array(192).fill(0.3) } } })),
  integers: labels(await model(integers)),
};
const raw = await model(integers, { raw: true });
results.raw = [...raw.outputs.values()].map(({ datatype, data }) => [datatype, Array.from(data)])[0];
const { class_map, shares } = Object.fromEntries(
  (await client.model("kitchen", "mask")({ image: process.argv[4] })).outputs,
);
const { shape: size, data } = class_map;
results.mask = { shape: size, classes: Array.from(data), shares: Array.from(shares.data) };
await client.close();
console.log(JSON.stringify(results));
"""
Scores = dict[int, float]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    model = means(tmp_path_factory.mktemp("means") / "means.onnx", "uint8", SCALE, ZERO, "NHWC")
    return compile(model, options=Options(preprocess="unit", postprocess="top3"), identity=Identity("means"))


def segmenter(path: Path) -> Path:
    """Write a model of one channel, the real mean of each pixel; bytes on both sides, channels last."""
    nodes = [
        helper.make_node("DequantizeLinear", ["picture", "s", "z"], ["real"]),
        helper.make_node("ReduceMean", ["real"], ["mean"], axes=[3], keepdims=1),
        helper.make_node("QuantizeLinear", ["mean", "t", "nine"], ["mask"]),
    ]
    given = {"s": np.float32(1 / 255), "z": np.int8(-128), "t": np.float32(1 / 200), "nine": np.uint8(9)}
    graph = helper.make_graph(
        nodes,
        "segmenter",
        [helper.make_tensor_value_info("picture", TensorProto.INT8, [1, 8, 8, 3])],
        [helper.make_tensor_value_info("mask", TensorProto.UINT8, [1, 8, 8, 1])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in given.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(scope="module")
def mask(tmp_path_factory: pytest.TempPathFactory) -> Package:
    model = segmenter(tmp_path_factory.mktemp("mask") / "mask.onnx")
    options = Options(preprocess="unit", postprocess="segmentation", labels=["person"])
    return compile(model, options=options, identity=Identity("mask"))


@pytest.fixture(scope="module")
def person(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three of eight columns are brighter than a half: 140 of 255, whose byte is below a half."""
    path = tmp_path_factory.mktemp("person") / "person.png"
    pixels = np.full((8, 8, 3), 110, np.uint8)
    pixels[:, 5:] = 140
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def site(
    tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path, package: Package, mask: Package
) -> Iterator[Site]:
    """One of its own, with the models `means` and `mask`."""
    for site in run_site(tmp_path_factory.mktemp("quantised"), digits_bundle):
        deploy(site, package, "means")
        deploy(site, mask, "mask")
        yield site


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "red.png"
    Image.new("RGB", (20, 10), COLOUR).save(path)
    return path


@pytest.fixture(scope="module")
def expected(package: Package, picture: Path) -> dict[str, Scores]:
    """What `run` answers, by class; the numbers themselves are those of the colour."""
    given: dict[str, Any] = {"picture": picture, "real": {"picture": REAL}, "integers": {"picture": INTEGERS}}
    found = {}
    for name, inputs in given.items():
        answers: Any = run(package, inputs).answers
        if answers is None:  # of tensors, whose answer has the model's own outputs
            [steps] = run(package, inputs).outputs.values()
            found[name] = {i: float(step - 9) / 64 for i, step in enumerate(steps[0].astype(int))}
        else:
            found[name] = by_class(zip(answers["indices"], answers["scores"], strict=True))
    np.testing.assert_allclose([found["picture"][i] for i in range(3)], np.array(COLOUR) / 255, atol=1 / 64)
    np.testing.assert_allclose(list(found["real"].values()), 0.3, atol=1 / 64)
    np.testing.assert_allclose(list(found["integers"].values()), (90 - ZERO) * SCALE, atol=1 / 64)
    return found


def by_class(labels: Any) -> Scores:
    return {int(index): float(score) for index, score in labels}


def test_python(site: Site, picture: Path, expected: dict[str, Scores]) -> None:
    with Client(site.url) as client:
        model = client.model("kitchen", "means")
        for name, answer in (
            ("picture", model(image=picture)),
            ("real", model(REAL)),
            ("integers", model(INTEGERS)),
        ):
            assert by_class((label.index, label.score) for label in answer.labels) == expected[name], name
        [raw] = dict(model(INTEGERS, raw=True)).values()
        assert (raw.dtype, raw.tolist()) == (np.uint8, [[9 + round((90 - ZERO) * SCALE * 64)] * 3])


def test_a_mask_of_one_channel(site: Site, mask: Package, person: Path) -> None:
    here: Any = run(mask, person).answers
    page = asked(site, "mask", person)["map"]
    with Client(site.url) as client:
        there = client.model("kitchen", "mask")(image=person)
        np.testing.assert_array_equal(there["class_map"], CLASSES)
        np.testing.assert_array_equal(there["shares"], here["shares"])
        assert there.output("labels").values.tolist() == ["background", "person"]
    np.testing.assert_array_equal(here["class_map"], CLASSES)
    assert (page["size"], page["labels"], page["shares"]) == (
        [8, 8],
        ["background", "person"],
        [0.625, 0.375],
    )
    assert base64.b64decode(page["values"]) == CLASSES.astype(np.uint8).tobytes()


def test_javascript(
    site: Site,
    npm: Callable[[str], Path],
    tmp_path: Path,
    picture: Path,
    person: Path,
    expected: dict[str, Scores],
) -> None:
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(MAIN)
    (tmp_path / "edgebundle.js").write_bytes((LIBRARY / "edgebundle.js").read_bytes())
    done = subprocess.run(
        [needed("node", "nodejs"), "main.js", site.url, str(picture), str(person)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("raw") == ["UINT8", [9 + round((90 - ZERO) * SCALE * 64)] * 3]
    seen = {"shape": [8, 8], "classes": CLASSES.ravel().tolist(), "shares": [0.625, 0.375]}
    assert found.pop("mask") == seen
    assert {name: by_class(labels) for name, labels in found.items()} == expected


def asked(site: Site, model: str, picture: Path) -> dict[str, Any]:
    """Return what the dashboard's page gets of a picture."""

    async def answered() -> dict[str, Any]:
        dashboard = Dashboard(Broker(site.url), port=0)
        await dashboard.start()
        try:
            await until(
                lambda: (device := dashboard.fleet.get("kitchen")) is not None and model in device.models
            )
            path, body = f"/api/ask?agent=kitchen&model={model}", picture.read_bytes()
            answer = await ask(dashboard, path, method="POST", body=body)
            assert answer.code == 200, answer.body
            found: dict[str, Any] = json.loads(answer.body)
            return found
        finally:
            await dashboard.close()

    return asyncio.run(answered())


def test_the_dashboard(site: Site, picture: Path, expected: dict[str, Scores]) -> None:
    labels = asked(site, "means", picture)["labels"]
    scores = by_class((label["index"], label["score"]) for label in labels)
    assert scores == pytest.approx(expected["picture"], abs=1e-6)
