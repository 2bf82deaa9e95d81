"""The program that tries the cases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.conformance.__main__ import TITLES, main


def test_without_a_source_all_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for source in TITLES:
        (tmp_path / "cases" / source).mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["conformance", "--made", "--folder", str(tmp_path)])
    assert main() == 0
    printed = capsys.readouterr().out
    assert all(title in printed for title in TITLES.values())


def test_unknown_source_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["conformance", "tract"])
    with pytest.raises(SystemExit):
        main()
    assert "expected one of onnx_nodes, " in capsys.readouterr().err
