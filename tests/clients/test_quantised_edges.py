"""Integers with a scale at the edges: `run`, a device, the clients and the dashboard agree on the numbers."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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
await client.close();
console.log(JSON.stringify(results));
"""
Scores = dict[int, float]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    model = means(tmp_path_factory.mktemp("means") / "means.onnx", "uint8", SCALE, ZERO, "NHWC")
    return compile(model, options=Options(preprocess="unit", postprocess="top3"), identity=Identity("means"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, digits_bundle: Path, package: Package) -> Iterator[Site]:
    """One of its own, with the model `means`."""
    for site in run_site(tmp_path_factory.mktemp("quantised"), digits_bundle):
        deploy(site, package, "means")
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


def test_javascript(
    site: Site, npm: Callable[[str], Path], tmp_path: Path, picture: Path, expected: dict[str, Scores]
) -> None:
    (tmp_path / "node_modules").symlink_to(npm(MQTT))
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "main.js").write_text(MAIN)
    (tmp_path / "edgebundle.js").write_bytes((LIBRARY / "edgebundle.js").read_bytes())
    done = subprocess.run(
        [needed("node", "nodejs"), "main.js", site.url, str(picture)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("raw") == ["UINT8", [9 + round((90 - ZERO) * SCALE * 64)] * 3]
    assert {name: by_class(labels) for name, labels in found.items()} == expected


def test_the_dashboard(site: Site, picture: Path, expected: dict[str, Scores]) -> None:
    async def answered() -> dict[str, Any]:
        dashboard = Dashboard(Broker(site.url), port=0)
        await dashboard.start()
        try:
            await until(
                lambda: (device := dashboard.fleet.get("kitchen")) is not None and "means" in device.models
            )
            path, body = "/api/ask?agent=kitchen&model=means", picture.read_bytes()
            answer = await ask(dashboard, path, method="POST", body=body)
            assert answer.code == 200, answer.body
            found: dict[str, Any] = json.loads(answer.body)
            return found
        finally:
            await dashboard.close()

    labels = asyncio.run(answered())["labels"]
    scores = by_class((label["index"], label["score"]) for label in labels)
    assert scores == pytest.approx(expected["picture"], abs=1e-6)
