"""Real networks on a real agent behind a real broker, driven by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from PIL import Image

from benchmarks.architectures import generate
from builder import Identity, Package, repack, run
from builder.bundles.key_files import read_private
from tests.acceptance.conftest import RealPackage
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, PROGRAM_PATIENCE_S

pytestmark = pytest.mark.slow
AGENT = "kitchen"


class Fleet:
    """An agent that trusts one key, and the command line, connected to the same broker."""

    def __init__(self, broker: str, folder: Path) -> None:
        self.broker, self.folder = broker, folder
        self.edgebundle("keygen", "keys")
        trust = folder / "trust"
        trust.mkdir()
        (trust / "signing.pub").write_bytes((folder / "keys" / "signing.pub").read_bytes())
        command = [sys.executable, "-m", "agent", "run", "--broker", broker, "--device", AGENT]
        command += ["--trust", str(trust), "--state-dir", str(folder / "state")]
        self.log = (folder / "agent.log").open("wb")
        self.agent = subprocess.Popen(command, stderr=self.log, stdout=self.log)
        self._wait_until_online()

    def _wait_until_online(self) -> None:
        end = time.monotonic() + PROGRAM_PATIENCE_S
        while time.monotonic() < end:
            seen = json.loads(self.edgebundle("agents", "--broker", self.broker, "--json"))
            if any(agent["state"] == "online" for agent in seen if agent["name"] == AGENT):
                return
        pytest.fail((self.folder / "agent.log").read_text())

    def edgebundle(self, *arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "builder", *map(str, arguments)],
            cwd=self.folder, capture_output=True, text=True, timeout=PROGRAM_PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compile(self, model: Path, *options: str | Path) -> Path:
        path = self.folder / f"{model.stem.lower()}.bundle"
        self.edgebundle("compile", model, "--sign-key", "keys/signing.key", "-o", path, *options)
        return path

    def sign(self, package: Package) -> Path:
        path = self.folder / f"{package.manifest.name}.bundle"
        package.sign(read_private(self.folder / "keys" / "signing.key")).save(path)
        return path

    def deploy(self, bundle: Path) -> str:
        self.edgebundle("deploy", bundle, "--agent", AGENT, "--broker", self.broker)
        return bundle.stem

    def infer(self, model: str, *options: str | Path) -> str:
        return self.edgebundle("infer", "--agent", AGENT, "--model", model, "--broker", self.broker, *options)

    def stop(self) -> int:
        self.agent.terminate()
        code = self.agent.wait(PATIENCE_S)
        self.log.close()
        return code


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    broker = BrokerProcess("mosquitto", folder)
    broker.start()
    fleet = Fleet(broker.url, folder)
    yield fleet
    assert fleet.stop() == 0
    broker.stop()


# The centre of each face, as a person sees it, in pixels of the photograph, from left to right.
FACES = {"faces-1.jpg": [(270, 163)], "faces-2.jpg": [(123, 60), (331, 127)]}
HALF_A_FACE = 35


@pytest.mark.models
@pytest.mark.parametrize("name", ["slim-320", "RFB-320"])
def test_faces_are_found_in_photographs(
    fleet: Fleet, models: Path, real_package: RealPackage, name: str
) -> None:
    model = fleet.deploy(fleet.sign(real_package(name, "host")))
    for photograph, middles in FACES.items():
        answer = json.loads(fleet.infer(model, "--input", models / photograph, "--json"))
        outputs = {output["name"]: output for output in answer["outputs"]}
        boxes = np.reshape(outputs["boxes"]["data"], (-1, 4))
        found = sorted(((x0 + x1) / 2, (y0 + y1) / 2) for x0, y0, x1, y1 in boxes)
        assert len(found) == len(middles)
        for (x, y), (seen_x, seen_y) in zip(found, middles, strict=True):
            assert abs(x - seen_x) < HALF_A_FACE
            assert abs(y - seen_y) < HALF_A_FACE


def yunet_faces(outputs: dict[str, np.ndarray], size: int = 320) -> list[tuple[float, float, float]]:
    """Decode YuNet's raw outputs as its authors do; return score and centre (x, y) of each face."""
    found = []
    for stride in (8, 16, 32):
        columns = size // stride
        score = np.sqrt(outputs[f"cls_{stride}"] * outputs[f"obj_{stride}"]).reshape(-1)
        box = outputs[f"bbox_{stride}"].reshape(-1, 4)
        for i in np.flatnonzero(score > 0.6):
            x, y = (i % columns + box[i, 0]) * stride, (i // columns + box[i, 1]) * stride
            found.append((float(score[i]), float(x), float(y)))
    faces: list[tuple[float, float, float]] = []
    for score, x, y in sorted(found, reverse=True):
        if all(abs(x - a) > HALF_A_FACE or abs(y - b) > HALF_A_FACE for _, a, b in faces):
            faces.append((score, x, y))
    return faces


@pytest.mark.models
def test_a_detector_with_raw_outputs_finds_the_same_faces(
    fleet: Fleet, models: Path, real_package: RealPackage, tmp_path: Path
) -> None:
    model = fleet.deploy(fleet.sign(real_package("yunet_n_320", "host")))
    for photograph, middles in FACES.items():
        fleet.infer(model, "--input", models / photograph, "--outputs", tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as answer:
            faces = yunet_faces({name: answer[name] for name in answer.files})
        width, height = Image.open(models / photograph).size
        found = sorted((x * width / 320, y * height / 320) for _, x, y in faces)
        assert len(found) == len(middles)
        for (x, y), (seen_x, seen_y) in zip(found, middles, strict=True):
            assert abs(x - seen_x) < HALF_A_FACE
            assert abs(y - seen_y) < HALF_A_FACE


@pytest.mark.models
def test_a_repacked_detector_answers_on_the_device_as_on_the_workstation(
    fleet: Fleet, models: Path, real_package: RealPackage
) -> None:
    package = repack(
        real_package("yunet_n_320", "host"),
        identity=Identity("points"),
        preprocess="yunet",
        postprocess="yunet",
        labels=["face"],
    )
    model = fleet.deploy(fleet.sign(package))
    for photograph, middles in FACES.items():
        answer = json.loads(fleet.infer(model, "--input", models / photograph, "--json"))
        outputs = {output["name"]: output for output in answer["outputs"]}
        expected: Any = run(package, models / photograph).answers
        assert outputs["labels"]["data"] == ["face"] * len(middles)
        assert outputs["keypoints"]["shape"] == [len(middles), 5, 2]
        for name in ("boxes", "scores", "classes", "keypoints"):
            found = np.reshape(outputs[name]["data"], outputs[name]["shape"])
            np.testing.assert_allclose(found, expected[name], rtol=1e-5)


def test_bert_answers_int64_tensors(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "bert.onnx"
    onnx.save(generate("bert", layers=2, hidden=128, heads=2, vocabulary=1000), path)
    shapes = "input_ids:[1,16] attention_mask:[1,16] token_type_ids:[1,16]"
    fleet.deploy(fleet.compile(path, "--input-shapes", shapes))
    inputs: dict[str, Any] = {
        "input_ids": np.random.default_rng(1).integers(0, 1000, (1, 16)),
        "attention_mask": np.array([[1] * 12 + [0] * 4]),
        "token_type_ids": np.array([[0] * 8 + [1] * 8]),
    }
    np.savez(tmp_path / "inputs.npz", **inputs)
    fleet.infer("bert", "--input", tmp_path / "inputs.npz", "--outputs", tmp_path / "out.npz")
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    with np.load(tmp_path / "out.npz") as answer:
        for output, reference in zip(session.get_outputs(), session.run(None, inputs), strict=True):
            error = np.abs(answer[output.name] - reference).max() / np.abs(reference).max()
            assert error <= 1e-4
