"""Making cases: an exporter that fails or dies, and a run that continues."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.conformance.case import Case, is_written
from benchmarks.conformance.sources import makers


def make(folder: Path) -> Case:
    (folder / "m.onnx").write_bytes(b"")
    return Case("onnx_nodes", "good", "Add", folder / "m.onnx", {}, [np.zeros(1)])


def fail(folder: Path) -> Case:
    raise ValueError("cannot\nexport")


def die(folder: Path) -> Case:
    raise KeyboardInterrupt


def test_what_cannot_be_made_is_left_out_with_its_reason(tmp_path: Path) -> None:
    each = [("a/b", make), ("bad", fail), ("die", die), ("last", make)]
    with pytest.raises(KeyboardInterrupt):
        makers.make_all(iter(each), tmp_path)
    assert not is_written(tmp_path / "last")
    makers.make_all(iter(each), tmp_path)
    assert is_written(tmp_path / "a_b")
    assert is_written(tmp_path / "last")
    assert makers.not_made(tmp_path) == {
        "bad": "ValueError: cannot",
        "die": "the exporter's process died",
    }
