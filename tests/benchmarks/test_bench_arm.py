"""Which models `make bench-arm` takes, what it keeps between runs, and what it leaves out."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest

from benchmarks import bench_arm, prepare
from benchmarks.bench_arm import Prepared, _largest_difference, _parser, _saved, count
from benchmarks.engines import OURS, UnavailableError
from benchmarks.instructions.emulator import Emulator


def test_the_zoo_and_files_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "own.onnx"
    file.touch()
    given = ["mobilenetv2", "squeezenet1_1", str(file)]
    assert _parser().parse_args(["--models", *given]).models == given


def test_an_unknown_model_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--models", "squeezenet9"])
    assert "expected a model or an ONNX file with fixed shapes, got 'squeezenet9'" in capsys.readouterr().err


def test_a_file_is_read() -> None:
    assert prepare.source(str(prepare.DIGITS)) == prepare.source("digits")


def test_a_file_with_the_name_of_a_model_is_another_model(tmp_path: Path) -> None:
    own = tmp_path / "resnet18-int8.onnx"
    own.write_bytes(prepare.DIGITS.read_bytes())
    place = _saved(str(own), tmp_path / "models").parent
    assert _largest_difference(place.name) < _largest_difference("resnet18-int8")


def test_what_was_counted_is_kept_only_for_the_same_file(tmp_path: Path) -> None:
    own, folder = tmp_path / "own.onnx", tmp_path / "models"
    own.write_bytes(prepare.DIGITS.read_bytes())
    kept = _saved(str(own), folder).parent / "count-onnxruntime.json"
    kept.touch()
    _saved(str(own), folder)
    assert kept.exists()
    other = onnx.load(own)
    other.graph.initializer[0].float_data.append(1.0)
    onnx.save(other, own)
    assert onnx.load(_saved(str(own), folder)) == other
    assert not kept.exists()


def test_another_engine_that_fails_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    emulator = mock.create_autospec(Emulator, instance=True)
    emulator.version.return_value = "1.0"
    emulator.instructions_of_an_inference.side_effect = RuntimeError("guest.py under qemu ended with -11: x")
    model = Prepared(tmp_path, [], {})
    assert count(emulator, "onnxruntime", model, "cortex-a72") is None
    assert capsys.readouterr().out == "  without ONNX Runtime: guest.py under qemu ended with -11: x\n"
    with pytest.raises(RuntimeError, match="ended with -11"):
        count(emulator, OURS, model, "cortex-a72")


def test_another_engine_with_other_results_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emulator = mock.create_autospec(Emulator, instance=True)
    emulator.version.return_value = "1.0"
    emulator.instructions_of_an_inference.return_value = 2_000_000
    for engine, value in ("onnxruntime", 1.5), (OURS, 1.5), ("litert", 1.0):
        np.savez(tmp_path / f"outputs-arm-{engine}.npz", np.array([value]))
    (tmp_path / "model.tflite").touch()
    model = Prepared(tmp_path, [np.array([1.0])], {})
    assert count(emulator, "litert", model, "cortex-a72") == 2.0
    assert count(emulator, "onnxruntime", model, "cortex-a72") is None
    assert "got 5.0e-01" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="expected a relative difference"):
        count(emulator, OURS, model, "cortex-a72")


def test_a_file_with_operators_that_ncnn_lacks_is_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "model.ncnn.param"

    def convert_for_ncnn(_model: Path, _shape: tuple[int, ...]) -> Path:
        written.write_text("pnnx.Expression")
        raise UnavailableError("pnnx cannot convert it to operators of ncnn")

    monkeypatch.setattr(bench_arm, "convert_for_ncnn", convert_for_ncnn)
    bench_arm._convert(tmp_path / "model.onnx", {"x": np.zeros((1, 3))}, ["ncnn"])
    assert capsys.readouterr().out == "  without ncnn: pnnx cannot convert it to operators of ncnn\n"
    assert not written.exists()
