"""Which models `make bench-arm` takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import prepare
from benchmarks.bench_arm import _parser


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
