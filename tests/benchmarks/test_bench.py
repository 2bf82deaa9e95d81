"""The benchmark compares like with like, and reports how reliable its figures are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import bench, tables
from benchmarks.engine_process import EngineProcess, Turn
from benchmarks.engines import OURS, UNTUNED
from benchmarks.layers import Layer, Layers, Roof
from benchmarks.noise import Noise
from benchmarks.prepare import HEADLINE, prepare
from benchmarks.rounds import Measured, difference, measure


def measured(model: str = "resnet18", threads: int = 1, **turns_ms: list[float]) -> Measured:
    return Measured(model, threads, turns_ms)


def test_a_ratio_is_that_of_the_medians_over_the_fastest_other_engine() -> None:
    result = measured(
        edgebundle=[8.0, 80.0, 9.0], onnxruntime=[20.0, 20.0, 20.0], openvino=[18.0, 18.0, 19.0]
    )
    ratio = result.ratio()
    assert result.best_other == "openvino"
    assert ratio is not None
    assert ratio.value == 9.0 / 18.0


def test_drift_of_the_machine_does_not_widen_the_spread() -> None:
    # In each round the machine is three times slower than before, for all engines.
    result = measured(edgebundle=[1.0, 3.0, 9.0], onnxruntime=[2.0, 6.0, 18.0])
    ratio = result.ratio()
    assert ratio is not None
    assert (ratio.low, ratio.high) == (0.5, 0.5)


def test_our_untuned_bundle_is_not_another_engine() -> None:
    assert measured(edgebundle=[5.0], untuned=[4.0], ncnn=[9.0]).best_other == "ncnn"


def test_without_an_applicable_record_untuned_is_the_same() -> None:
    result = measured(edgebundle=[5.0], ncnn=[10.0])
    assert result.ratio(UNTUNED) == result.ratio(OURS)


def test_the_geometric_mean_is_of_all_headline_models_and_no_others() -> None:
    results = [measured(model, edgebundle=[1.0], openvino=[2.0]) for model in HEADLINE]
    results.append(measured("digits", edgebundle=[100.0], openvino=[1.0]))
    assert tables.geometric_mean(results, OURS) == pytest.approx(0.5)
    results[0] = measured(HEADLINE[0], openvino=[2.0])
    assert tables.geometric_mean(results, OURS) is None


def test_the_table_stars_what_was_disturbed_and_dashes_what_is_missing() -> None:
    busy = measured(edgebundle=[1.0], onnxruntime=[2.0])
    busy.noise = Noise(others=0.2, preempted_per_s=3.0, load=4.0)
    calm = measured("bert", 2, edgebundle=[10.0], openvino=[20.0])
    heads, body = tables.rows([busy, calm])
    assert heads[-2:] == ["over the best, untuned", "over the best"]
    assert body[0] == ["resnet18", "1*", "1.00", "1.00", "2.00", "–", "0.50", "0.50 (ONNX Runtime)"]
    assert body[1] == ["bert", "2", "10.0", "10.0", "–", "20.0", "0.50", "0.50 (OpenVINO)"]
    assert tables.markdown(heads, body).splitlines()[1].count("---") == len(heads)


def test_outputs_are_compared_by_size_whatever_the_order_and_the_batch() -> None:
    scores, boxes = np.arange(6.0).reshape(1, 3, 2), np.arange(12.0).reshape(1, 3, 4)
    assert difference([boxes[0], scores[0]], [scores, boxes]) == 0.0
    assert difference([boxes[0] * 1.5, scores[0]], [scores, boxes]) == pytest.approx(0.5)
    assert difference([scores], [scores, boxes]) == float("inf")


def test_the_share_of_the_peak_counts_operations_of_products_but_the_time_of_all_layers() -> None:
    roof = Roof(100.0, {"memory": 10.0})
    layers = Layers(
        1,
        roof,
        (
            Layer("conv2d", "conv2d", 10.0, 1_000_000.0, 1e4),
            Layer("softmax", "other", 10.0, 9_000_000.0, 1e4),
        ),
    )
    assert layers.layers[0].gflops == pytest.approx(100.0)
    assert layers.share_of_peak == pytest.approx(0.5)


def test_markdown_before_the_first_run_is_an_error_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--markdown", "--output", str(tmp_path)]) == 2
    assert "hint: run the benchmark first" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_model_is_measured_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pictures need matplotlib, which is in the other engines' environment.
    monkeypatch.setattr(bench, "_pictures", lambda *_: None)
    options = [
        "--models",
        "digits",
        "--engines",
        OURS,
        UNTUNED,
        "onnxruntime",
        "--threads",
        "1",
        "--times-only",
    ]
    assert bench.main([*options, "--rounds", "2", "--turn", "0.02", "--output", str(tmp_path)]) == 0
    document = json.loads((tmp_path / "bench.json").read_text())
    (result,) = document["results"]
    assert result["model"] == "digits"
    assert 0 < result["median_ms"][OURS] < 100
    assert 0 < result["median_ms"]["onnxruntime"] < 100
    assert result["best_other"] == "onnxruntime"
    assert result["parity"][OURS] <= 1e-4
    assert result["parity"]["onnxruntime"] < 1e-5
    assert "zoo" not in document
    assert "| digits | 1" in (tmp_path / "bench.md").read_text()
    assert "Milliseconds per inference" in capsys.readouterr().out
    capsys.readouterr()
    assert bench.main(["--markdown", "--output", str(tmp_path)]) == 0
    assert "| digits | 1" in capsys.readouterr().out


@pytest.mark.slow
def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    np.savez(tmp_path / "inputs.npz", x=np.zeros(1, np.float32))
    process = EngineProcess("onnxruntime", tmp_path / "absent.onnx", 1)
    try:
        problem = process.ready()
    finally:
        process.stop()
    assert problem is not None
    assert "absent.onnx" in problem


@pytest.mark.slow
def test_an_engine_that_dies_in_a_turn_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = prepare("digits", tmp_path)
    turn, turns = EngineProcess.turn, []

    def dies_in_its_second_turn(process: EngineProcess, seconds: float) -> Turn:
        turns.append(process.name)
        if turns.count("onnxruntime") == 2 and process.name == "onnxruntime":
            process.stop()
        return turn(process, seconds)

    monkeypatch.setattr(EngineProcess, "turn", dies_in_its_second_turn)
    engines = [OURS, "onnxruntime"]
    result = measure("digits", model.path, 1, engines, model.reference, rounds=3, turn_s=0.01)
    assert list(result.turns_ms) == [OURS]
    assert len(result.turns_ms[OURS]) == 3
    assert "-9" in result.problems["onnxruntime"]


def test_int8_is_compared_with_our_float32_of_the_same_network() -> None:
    times = {
        "resnet18": {OURS: 20.0, "onnxruntime": 10.0},
        "resnet18-int8": {OURS: 15.0, "onnxruntime": 5.0},
        "mobilenetv2-int8": {OURS: 5.0},  # float32 was not measured
        "resnet50": {OURS: 60.0},
    }
    assert tables.over_float32(times, OURS) == {"resnet18": 0.75}
