"""`edgebundle compile` with dimensions that have bounds: mistakes are told before the compiler is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from tests import changing_models, streaming_models
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
        (["--input-shapes", "x:[0..4,3]"], "input 'x': expected bounds from 1, got 0..4"),
        (["--input-shapes", "x:[0..4,3]", "--state", "x:y", "--pad", "x=1"], "--pad: expected no state"),
        (
            ["--input-shapes", "x:[1..4,3]", "--precision", "int8", "--calibration", "."],
            "--precision int8: expected fixed shapes, got bounds",
        ),
        (
            ["--input-shapes", "x:[1..4,3]", "--precision", "fp16", "--target", "rpi5"],
            "--precision fp16: expected fixed shapes, got bounds",
        ),
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
def test_a_decoder_with_caches_that_grow(edgebundle: Edgebundle, tmp_path: Path) -> None:
    path = tmp_path / "writer.onnx"
    onnx.save(streaming_models.decoder(), str(path))
    flags = ["--state", "past.*:present.*", "-o", str(tmp_path / "writer.bundle")]
    bounds = ["--input-shapes", "past.key:[1,0..6,8]"]
    refused = edgebundle("compile", str(path), *flags, *bounds)
    assert refused.returncode == 4
    assert "hint: for an attention mask, --input-values mask=1" in refused.stderr
    result = edgebundle("compile", str(path), *flags, *bounds, "--input-values", "mask=1")
    assert result.returncode == 0, result
    shown = json.loads(edgebundle("inspect", str(tmp_path / "writer.bundle"), "--json").stdout)
    states = shown["manifest"]["states"]
    assert [(state["input"], state.get("most")) for state in states] == [
        ("past.key", None),
        ("past.value", None),
        ("edgebundle/cache/6", 6),
    ]
    assert edgebundle("run", str(tmp_path / "writer.bundle")).returncode == 0


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


@pytest.mark.slow
def test_check_looks_at_the_largest_size_and_other_verbs_take_one(
    edgebundle: Edgebundle, model: Path
) -> None:
    shown = edgebundle("check", str(model), "--input-shapes", "x:[1..4,3]")
    assert "input x: FP32 [4,3]" in shown.stdout
    refused = edgebundle(
        "tune", str(model), "--input-shapes", "x:[1..4,3]", "-o", str(model.parent / "records")
    )
    assert refused.returncode == 4
    assert "only `edgebundle compile` and `check` take bounds" in refused.stderr
