"""`edgebundle compile` with dimensions that have bounds: mistakes are told before the compiler is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests import changing_models
from tests.cli.terminal import Edgebundle


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "rows.onnx"
    onnx.save(changing_models.rows(), str(path))
    return path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--input-shapes", "x:[4..1,3]"], "sizes in increasing order in the shape of input 'x', got '4..1'"),
        (["--input-shapes", "x:[1..4,3]", "--buckets", "0"], "expected sizes of buckets, got '0'"),
        (["--input-shapes", "x:[1..4,3]", "--pad", "x"], "--pad: expected NAME=NUMBER or NAME=edge, got 'x'"),
        (["--buckets", "1,2"], "--buckets: expected bounds in --input-shapes, got none"),
        (["--pad", "x=1", "--input-shapes", "x:[4,3]"], "--pad: expected bounds in --input-shapes, got none"),
    ],
)
def test_mistakes(edgebundle: Edgebundle, model: Path, flags: list[str], words: str) -> None:
    result = edgebundle("compile", str(model), *flags)
    assert result.returncode == 4
    assert words in result.stderr, result
    assert not list(model.parent.glob("*.bundle"))


@pytest.mark.slow
def test_summary_and_inspect_say_the_bounds(edgebundle: Edgebundle, model: Path) -> None:
    out = model.with_suffix(".bundle")
    command = ["compile", str(model), "--input-shapes", "x:[1..4,3]", "-o", str(out)]
    result = edgebundle(*command, "--buckets", "2", "--pad", "x=0.5")
    assert result.returncode == 0, result
    assert "batch=1..4: compiled for 2, 4 (padded: x with 0.5)" in result.stdout
    shown = edgebundle("inspect", str(out)).stdout
    assert "x FP32 [batch=1..4,3]" in shown
    assert "y FP32 [batch=1..4,2]" in shown
    found = json.loads(edgebundle("inspect", str(out), "--json").stdout)
    assert found["manifest"]["buckets"]["batch"] == "batch"
    assert edgebundle("run", str(out), "--input-shapes", "x:[3,3]").returncode == 0
    refused = edgebundle("run", str(out), "--input-shapes", "x:[5,3]")
    assert refused.returncode == 4
    assert "batch must be from 1 to 4" in refused.stderr
