"""The tuning steps of the tutorial, on the command line and in Python: tune, compile, compare."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from builder import (
    Package,
    Records,
    RunnerOptions,
    TuneOptions,
    compile,
    extract_tasks,
    load,
    pick_best,
    resolve,
    run,
    tune,
)
from tests.acceptance.commands import edgebundle
from tests.two_operators import two_operators

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(two_operators(), path)
    return path


@pytest.fixture
def image(path: Path) -> dict[str, Any]:
    spec = load(path).inputs[0]
    return {spec.name: np.random.default_rng(0).random(spec.shape, dtype=np.float32)}


def test_on_the_command_line(path: Path, tmp_path: Path, image: dict[str, Any]) -> None:
    np.savez(tmp_path / "image.npz", **image)
    edgebundle("compile", "--target", "llvm", "--output", "untuned.bundle", path, cwd=tmp_path)
    summary = edgebundle(
        "tune", "--target", "llvm", "--output", "records", "--trials", "2", "--number", "1", "--repeat", "2",
        "--min-repeat-ms", "0", "--pairs", "5", path, cwd=tmp_path,
    )  # fmt: skip
    assert re.search(r"^records: \d+ points of 2 operators; \d are faster when tuned$", summary, re.MULTILINE)
    found = re.search(r"(\d) are faster when tuned", summary)
    assert found
    faster = int(found[1])
    assert ("next: edgebundle compile" in summary) <= (faster > 0)
    assert (tmp_path / "records" / "report.html").exists()
    edgebundle(
        "compile", "--target", "llvm", "--tuning-records", "records", "--output", "tuned.bundle", path,
        cwd=tmp_path,
    )  # fmt: skip
    outputs = []
    for name in ("untuned", "tuned"):
        printed = edgebundle(
            "run", "--inputs", "image.npz", "--outputs", f"{name}.npz", "--print-time", "--repeat", "100",
            f"{name}.bundle", cwd=tmp_path,
        )  # fmt: skip
        table = printed[printed.index("Execution time summary:") :].splitlines()
        assert table[1].split()[::2][0] == "mean"
        mean, _, most, least, _ = map(float, table[2].split())
        assert 0 < least <= mean <= most
        with np.load(tmp_path / f"{name}.npz") as file:
            outputs.append(file["output_0"])
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)


def test_from_python(path: Path, tmp_path: Path, image: dict[str, Any]) -> None:
    model = load(path)
    assert len(extract_tasks(model, "llvm")) == 2
    records = tune(
        model,
        "llvm",
        tmp_path / "records",
        options=TuneOptions(trials=2, pairs=5, tuner="xgb", early_stopping=3),
        runner=RunnerOptions(number=1, repeat=2, min_repeat_ms=0, timeout_s=30, cache_flush=True),
    )
    assert len(records.all) >= 4
    pick_best(records, tmp_path / "best", resolve("llvm")).close()
    results = []
    for name, used in (("untuned", None), ("tuned", tmp_path / "best"), ("again", records)):
        compile(model, target="llvm", tuning_records=used).save(tmp_path / f"{name}.bundle")
        package = Package.load(tmp_path / f"{name}.bundle")
        results.append(run(package, image, device="cpu", benchmark=True, repeat=100))
    assert Records.read(tmp_path / "best").meta.target == records.meta.target
    for result in results:
        assert result.times is not None
        assert len(result.times.results) == 100
        np.testing.assert_allclose(
            result.get_output("output_0"), results[0].get_output("output_0"), rtol=1e-4, atol=1e-5
        )
