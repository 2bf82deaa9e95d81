"""The comparison of odd with smooth extents reports factors, and names the worst operators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.odd.__main__ import by_kind, main, worst
from benchmarks.odd.operators import Operator
from benchmarks.odd.timing import Timed


def timed(kind: str, factor: float) -> Timed:
    odd = Operator(kind, {"rows": 37, "columns": 60})
    smooth = odd.smooth()
    return Timed(odd, smooth, factor * odd.useful, smooth.useful, {"kernel": "rows"})


def test_a_factor_is_of_the_times_per_useful_operation() -> None:
    odd = Operator("softmax", {"rows": 10, "columns": 60})
    # The neighbour has 64 columns: the same time per element is a factor of 1.
    assert Timed(odd, odd.smooth(), 600.0, 640.0, {}).factor == pytest.approx(1.0)
    assert Timed(odd, odd.smooth(), 640.0, 640.0, {}).factor == pytest.approx(64 / 60)


def test_kinds_have_their_median_and_worst_factor() -> None:
    results = [timed("softmax", 1.0), timed("layer-norm", 3.0), timed("softmax", 1.2), timed("softmax", 2.0)]
    _, body = by_kind(results)
    assert body == [
        ["softmax", "3", "1.20", "2.00", "1"],
        ["layer-norm", "1", "3.00", "3.00", "1"],
        ["all", "4", "1.60", "3.00", "2"],
    ]


def test_the_worst_come_first_by_name() -> None:
    _, body = worst([timed("softmax", 1.0), timed("layer-norm", 3.0), timed("softmax", 2.0)], 2)
    assert [row[:2] for row in body] == [
        ["layer-norm rows=37 columns=60", "3.00"],
        ["softmax rows=37 columns=60", "2.00"],
    ]


@pytest.mark.slow
def test_figures_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_NUM_THREADS", "1")
    command = ["--count", "2", "--kinds", "softmax", "pooling", "--blocks", "1", "--json"]
    assert main([*command, "--seed", "5", "--output", str(tmp_path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((tmp_path / "odd.json").read_text())
    assert [each["kind"] for each in document["operators"]] == ["softmax", "pooling"]
    assert all(each["factor"] > 0 for each in document["operators"])


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_status:
        main(["--kinds", "fft"])
    assert exit_status.value.code == 2
    assert "invalid choice: 'fft'" in capsys.readouterr().err
