"""The sensor example, as its README says: trained, compiled, and asked with the table that it writes."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from builder import cli
from builder.bundles.package import Package

pytestmark = pytest.mark.slow

SENSORS = Path(__file__).resolve().parents[2] / "examples" / "sensors"


def test_the_example_names_what_lies_on_the_grid(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("skl2onnx")
    found = importlib.util.spec_from_file_location("sensors_train", SENSORS / "train.py")
    assert found is not None
    assert found.loader is not None
    train = importlib.util.module_from_spec(found)
    found.loader.exec_module(train)
    monkeypatch.setattr(sys, "argv", ["train.py", "--output", str(tmp_path)])
    train.main()

    sensors, readings = tmp_path / "sensors.onnx", tmp_path / "readings.csv"
    bundle = tmp_path / "sensors.bundle"
    declared = ("--columns", tmp_path / "columns.csv", "--postprocess", "top3")

    def edgebundle(*arguments: object) -> tuple[str, str]:
        capfd.readouterr()
        code = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code == 0, err
        return out, err

    edgebundle("compile", sensors, *declared, "-o", bundle)
    assert "labels.txt" in Package.load(bundle).members

    out, _ = edgebundle("run", bundle, "--inputs", readings, "--accuracy", readings, "--json")
    document = json.loads(out)
    assert (document["rows"], document["failed"]) == (450, 0)
    assert document["accuracy"]["top1"] > 0.88 * 450
    _, err = edgebundle("run", bundle, "--inputs", readings, "--outputs", tmp_path / "answers.csv")
    assert err.splitlines()[0] == "columns that the model does not take: label"
    with (tmp_path / "answers.csv").open() as file:
        answers = list(csv.DictReader(file))
    _, _, _, names = train.load()
    assert np.mean([row["label"] == name for row, name in zip(answers, names, strict=True)]) > 0.88
    assert [row["line"] for row in answers[:2]] == ["2", "3"]
