"""The sensor example, as its README says: trained, compiled, and asked with the request that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from agent.runtime.postprocess import Postprocessor
from builder.compiling.compilation import compile as compile_model
from builder.importer import load
from builder.running.in_memory import executor

pytestmark = pytest.mark.slow

SENSORS = Path(__file__).resolve().parents[2] / "examples" / "sensors"


def test_the_example_names_what_lies_on_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("skl2onnx")
    found = importlib.util.spec_from_file_location("sensors_train", SENSORS / "train.py")
    assert found is not None
    assert found.loader is not None
    train = importlib.util.module_from_spec(found)
    found.loader.exec_module(train)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output", str(tmp_path)])
    train.main()

    package = compile_model(load(tmp_path / "sensors.onnx"), postprocess=str(SENSORS / "postprocess.toml"))
    members, manifest = package.members, package.manifest
    after = Postprocessor(manifest.postprocess, manifest.outputs, members["labels.txt"].splitlines())
    module = executor(members["mod.so"], members["mod.json"], members["mod.params"])

    def name_of(readings: np.ndarray) -> str:
        module.run(X=readings.reshape(1, 20).astype("f4"))
        outputs = {spec.name: module.get_output(place) for place, spec in enumerate(manifest.outputs)}
        answer = after(outputs)
        names = members["labels.txt"].decode().split()
        assert names[int(np.asarray(answer["label"])[0])] == answer["labels"][0].decode()
        return str(answer["labels"][0].decode())

    _, _, readings, names = train.load()
    right = [name_of(row) == name for row, name in zip(readings, names, strict=True)]
    assert np.mean(right) > 0.88
    (tensor,) = json.loads((tmp_path / "reading.json").read_text())["inputs"]
    assert name_of(np.array(tensor["data"])) == names[0]
