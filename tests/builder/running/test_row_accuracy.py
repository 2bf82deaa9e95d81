"""How often answers about rows are right, or how far off."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.running.row_accuracy import RowAccuracy, read_truths


def test_truths(tmp_path: Path) -> None:
    for name, text in (
        ("t.csv", "a,label\n1,x\n2, y \n"),
        ("t.csv", "class\nx\ny\n"),
        ("t.csv", "label\nx\ny\n"),
        ("t.jsonl", '{"label": "x"}\n{"label": "y", "a": 1}\n'),
    ):
        (tmp_path / name).write_text(text)
        assert list(read_truths(tmp_path / name)) == ["x", "y"]
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ModelError, match="expected a column 'label', got a, b"):
        list(read_truths(tmp_path / "t.csv"))
    (tmp_path / "t.json").write_text('[{"label": {}}]')
    with pytest.raises(ModelError, match="expected a row with 'label'"):
        list(read_truths(tmp_path / "t.json"))


def test_classes() -> None:
    accuracy = RowAccuracy()
    ranked = [["warm", "1"], ["cold", "0"]]
    for truth in ("warm", "1", "cold", "hot"):
        accuracy.add({"label": "warm", "probability": 0.5}, ranked, truth)
    assert accuracy.document() == {"rows": 4, "top1": 2, "top5": 3}
    assert str(accuracy) == "top-1 50.0 % of 4 rows"  # of two classes, top-5 says nothing
    accuracy.add({"label": "a"}, [[name] for name in "abcde"], "e")
    assert str(accuracy) == "top-1 40.0 %, top-5 80.0 % of 5 rows"
    accuracy = RowAccuracy()
    accuracy.add({"label": "warm", "p_0": 1.0}, [], "warm")
    assert accuracy.document() == {"rows": 1, "top1": 1, "top5": 1}


def test_numbers() -> None:
    accuracy = RowAccuracy()
    for value, truth in ((1.0, "2"), (5, "2")):
        accuracy.add({"prediction": value}, [], truth)
    assert accuracy.document() == {"rows": 2, "mean_absolute_error": 2, "root_mean_square": 5**0.5}
    assert str(accuracy) == "mean absolute error 2, root mean square 2.23607 of 2 rows"
    for cells, truth in (({"a": 1, "b": 2}, "1"), ({"a": 1}, "x"), ({}, "1")):
        with pytest.raises(ModelError, match="--accuracy: expected"):
            RowAccuracy().add(cells, [], truth)
