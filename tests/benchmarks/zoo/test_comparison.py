"""The zoo compares in turn, leaves out what cannot be exported, and averages ratios geometrically."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from rich.console import Console

from benchmarks.engines import OURS
from benchmarks.zoo import comparison
from benchmarks.zoo.__main__ import main, report
from benchmarks.zoo.comparison import Compared, LeftOutError, compare, geometric_mean, rows
from benchmarks.zoo.in_turn import REFERENCE
from benchmarks.zoo.models import DEFAULT, NAMES


def compared(model: str, *ratios: float, compile_s: float | None = 5.0) -> Compared:
    times = {i + 1: {OURS: 2.0 * ratio, REFERENCE: 2.0} for i, ratio in enumerate(ratios)}
    return Compared(model, compile_s, times)


def test_the_default_is_twelve_of_the_names() -> None:
    assert len(set(DEFAULT)) == 12
    assert set(DEFAULT) <= set(NAMES)
    assert len(set(NAMES)) == len(NAMES) >= 45


def test_the_mean_is_geometric_and_the_slowest_comes_first() -> None:
    results = [compared("fast", 0.5, 0.25), compared("slow", 2.0, 4.0, compile_s=None)]
    assert geometric_mean(results, 1) == pytest.approx(1.0)
    heads, body = rows(results)
    assert [row[0] for row in body] == ["slow", "fast", "geometric mean"]
    assert body[1] == ["fast", "1.00", "2.00", "0.50", "0.500", "2.00", "0.25", "5.0"]
    assert (body[0][-1], body[2][-1]) == ("–", "5.0 (median)")
    assert all(len(row) == len(heads) for row in body)


def test_a_model_that_cannot_be_exported_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(_name: str, _path: Path) -> None:
        raise LeftOutError("the export failed: ModuleNotFoundError: No module named 'torchvision'")

    monkeypatch.setattr(comparison, "export", export)
    lines: list[str] = []
    assert list(compare(["vgg11"], [1], tmp_path, progress=lines.append)) == []
    assert lines == ["without vgg11: the export failed: ModuleNotFoundError: No module named 'torchvision'"]


def test_a_process_that_takes_too_long_is_left_out() -> None:
    with pytest.raises(LeftOutError, match="it does not compile: it took more than 0 s"):
        comparison._run([sys.executable, "-c", "import time; time.sleep(9)"], 0.2, "it does not compile")


def test_the_last_line_of_a_failed_process_is_the_reason() -> None:
    with pytest.raises(LeftOutError, match=r"^measuring failed: ValueError: no$"):
        comparison._run([sys.executable, "-c", "raise ValueError('no')"], 60, "measuring failed")


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["alexnet"])
    assert exit_status.value.code == 2
    assert "got alexnet" in capsys.readouterr().err


@pytest.mark.slow
def test_both_engines_are_timed_and_reported(tmp_path: Path) -> None:
    place = tmp_path / "gru"
    place.mkdir()
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 64])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 64])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, place / "gru.onnx")  # what exists already is not exported
    lines: list[str] = []
    (result,) = compare(["gru"], [1], tmp_path, blocks=1, progress=lines.append)
    assert set(result.times_ms[1]) == {OURS, REFERENCE}
    assert all(value > 0 for value in result.times_ms[1].values())
    assert lines[0].startswith("gru: ")
    document = report(Console(quiet=True), [result], tmp_path, None)
    assert document["geometric_mean"][1] == pytest.approx(result.ratio(1))
    assert (tmp_path / "zoo.json").exists()
