"""Answers as tables: a label and a probability, or values, in files that programs read back."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.terminal import Cell
from builder.cli.answers import output_of
from builder.errors import ModelError
from builder.running.row_answers import cells_of, ranked, shown, writing
from edgebundle.answer import Answer, Timing

TOP: dict[str, Any] = {
    "labels": (b"warm", b"cold"),
    "scores": np.array([0.1, 0.05], np.float32),
    "indices": np.array([1, 0]),
    "label": np.array([1]),
}


def answer(values: dict[str, Any]) -> Answer:
    outputs = tuple(output_of(name, value) for name, value in values.items())
    return Answer("agent", "model", "1", outputs, Timing(0.1))


def test_cells() -> None:
    top = cells_of(answer(TOP))
    assert top == {"label": "warm", "probability": 0.100000001}
    without = answer({name: value for name, value in TOP.items() if name != "labels"})
    assert cells_of(without) == {"label": 1, "probability": 0.100000001}
    trees = answer({"label": np.array([1]), "p": np.array([[0.25, 0.75]])})
    assert cells_of(trees, ("cold", "warm")) == {"label": "warm", "p_0": 0.25, "p_1": 0.75}
    assert cells_of(answer({"label": np.array([7])}), ("cold", "warm")) == {"label": 7}
    assert cells_of(answer({"y": np.array([np.nan])})) == {"y": "nan"}
    assert shown(top) == "0.1000  warm"
    assert shown({"y_0": 0.123456789, "y_1": 2}) == "y_0 0.123457, y_1 2"
    with pytest.raises(ModelError, match="at most 4096 values"):
        cells_of(answer({"y": np.zeros(5000)}))


def test_an_answer_with_one_class_has_its_number_too() -> None:
    trees = answer({"label": np.array([1]), "probabilities": np.array([0.2, 0.8])})
    assert ranked(trees, ("cold", "warm")) == [["warm", "1"]]
    assert ranked(trees) == []
    assert ranked(answer({"label": (b"warm",)}), ("cold", "warm")) == []
    assert ranked(answer(TOP)) == [["warm", "1"], ["cold", "0"]]


def test_files(tmp_path: Path) -> None:
    rows: list[dict[str, Cell]] = [
        {"label": "a", "probability": 0.5},
        {"label": "=HYPERLINK(1)", "probability": 1.0},
    ]
    read = {}
    for suffix in ("csv", "tsv", "json", "jsonl"):
        path = tmp_path / f"out.{suffix}"
        with writing(path) as writer:
            for line, row in enumerate(rows, 2):
                writer.write(line, row)
        read[suffix] = path.read_text()
    assert list(csv.DictReader(read["csv"].splitlines())) == [
        {"line": "2", "label": "a", "probability": "0.5"},
        {"line": "3", "label": "'=HYPERLINK(1)", "probability": "1.0"},
    ]
    assert read["tsv"].splitlines()[0] == "line\tlabel\tprobability"
    expected = [{"line": line, **row} for line, row in enumerate(rows, 2)]
    assert json.loads(read["json"]) == expected
    assert [json.loads(line) for line in read["jsonl"].splitlines()] == expected
    with writing(tmp_path / "none.json"):
        pass
    assert json.loads((tmp_path / "none.json").read_text()) == []


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing(tmp_path / "out.csv") as writer:
        writer.write(2, {"y": -1})
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with writing(tmp_path / "out.csv") as writer:
        writer.write(2, {"y": "-1.5"})
    assert (tmp_path / "out.csv").read_text() == "line,y\n2,-1.5\n"
    with pytest.raises(ModelError, match="expected a name that ends in"), writing(tmp_path / "out.xlsx"):
        pass


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        *((cell, f"'{cell}") for cell in ("=1+1", "+cmd", "-cmd", "@sum(1)", "\t=1", " =1", "＝1", "-")),
        ("\r=1", "' =1"),
        ("a\r=1", "a =1"),
        *((cell, cell) for cell in ("cat", "a=b", "", "-1.5e-3", "+2", "-inf", "nan", "3=", 4, -4.5, True)),
    ],
)
def test_no_cell_and_no_head_is_a_formula(tmp_path: Path, cell: Cell, written: Cell) -> None:
    path = tmp_path / "out.csv"
    with writing(path) as writer:
        writer.write(1, {"first": cell, str(cell): 2})
    heads, cells = csv.reader(io.StringIO(path.read_bytes().decode(), newline=""))
    assert cells == ["1", str(written), "2"]
    if isinstance(cell, str):
        assert heads == ["line", "first", written]
