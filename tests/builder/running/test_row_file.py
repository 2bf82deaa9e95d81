"""Files of rows, as spreadsheets, data frames and scripts write them, and damaged ones."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from builder.errors import ModelError
from builder.running.row_file import is_row_file, number, open_rows, read_header, typed

KNOWN = ("a", "b")


def values_of(path: Path) -> list[tuple[int, object]]:
    file = open_rows(path, KNOWN)
    if not file.is_text:
        return [(row.line, row.values) for row in file.rows]
    return [(row.line, typed(row.values, (), KNOWN, comma=file.comma)) for row in file.rows]


def written(folder: Path, content: bytes | str, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


TABLE = [(2, {"a": 1, "b": 2.5}), (3, {"a": None, "b": -3})]


@pytest.mark.parametrize(
    "content",
    [
        "a,b\n1,2.5\n,-3\n",
        "a,b\r\n1,2.5\r\n,-3",
        "a,b\r1,2.5\r,-3\r",
        "b,a,label\n2.5,1,x\n-3,NaN,y\n",
        "\ufeffa,b\n1,2.5\nNA,-3\n",
        "a;b\n1;2,5\n;-3\n",
        "a;b\n1;2.5\n;-3\n",
        "a\tb\n1\t2.5\nnull\t-3\n",
        '"a","b"\n"1","2.5"\n"",-3\n',
        " a , b \n 1 , 2.5 \n , -3 \n",
        'a,"x;y;z",b\n1,,2.5\n,,-3\n',
        "a,b\n1,25e-1\nnan,-3.\n\n\n",
        "a,b\n1,2.5\n,-3\n".encode("utf-16"),
        "a,b\ntrue,2.5\n,-3\n",
    ],
)
def test_tables(tmp_path: Path, content: bytes | str) -> None:
    assert [(line, dict(row)) for line, row in values_of(written(tmp_path, content))] == TABLE  # type: ignore[call-overload]


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, '\n\na,b,note\n1,2,"two\nlines"\n\n3,4,x\n')
    assert [line for line, _ in values_of(path)] == [4, 7]


def test_without_a_header_values_go_by_their_place(tmp_path: Path) -> None:
    assert values_of(written(tmp_path, "1,2\n3,4\n")) == [(1, [1, 2]), (2, [3, 4])]
    assert values_of(written(tmp_path, "1,2\n")) == [(1, [1, 2])]
    # A header may be numbers, if these are names.
    assert open_rows(written(tmp_path, "1,2\n3,4\n"), ("1", "2")).header == ("1", "2")
    with pytest.raises(ModelError, match="expected names in the first line, got numbers"):
        read_header(tmp_path / "t.csv")
    assert read_header(written(tmp_path, "x;y\n")) == ("x", "y")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected a table, got an empty file"),
        ("\n\n", "expected a table, got an empty file"),
        (b"\x00\x01\x02", ":1: expected text, got a zero byte"),
        ("a,b\n1,\xe9\n".encode("latin-1"), "expected text in UTF-8, got other bytes"),
        (b"\xff\xfea", "expected text in UTF-8, got other bytes"),
        ("a,b\n1\n", ":2: expected 2 cells, got 1"),
        ("a,b\n1,2,3\n", ":2: expected 2 cells, got 3"),
        ("a,a,b\n1,2,3\n", "expected each column once, got 'a' twice"),
        ('a,b\n1,"2\n', ":2: expected a table"),
        ('a,b\n1,"2"x\n', ":2: expected a table"),
        ('a,b\n"' + "1,2\n" * 200, ":2: expected a row of at most 100 lines"),
        ("a" + ",x" * 1_000_000 + "\n", ":1: expected at most 16384 columns"),
        ("a,b\n1" + ",2" * 1_000_000, ":2: expected at most 16384 columns"),
        ("a,b\n" + "1" * 5_000_000, ":2: expected a line of at most"),
        ('a,b\n"' + "1" * 200_000 + '",2\n', ":2: expected a table"),
        ("a,b\nx,1\n", "column 'a': expected a number, got 'x'"),
        ("a,b\n1_000,1\n", "column 'a': expected a number"),
        ("a,b\ninf,1\n", "column 'a': expected a number"),
        ("a,b\n٣,1\n", "column 'a': expected a number"),
        ("a,b\n0x10,1\n", "column 'a': expected a number"),
        ('a,b\n"1,5",1\n', "column 'a': expected a number"),
        ("a,b\n" + "9" * 401 + ",1\n", "column 'a': expected a number"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: bytes | str, message: str) -> None:
    path = written(tmp_path, content)
    tracemalloc.start()
    with pytest.raises((ModelError, ValueError), match=message) as caught:
        values_of(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 << 20
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


def test_a_column_twice_that_the_model_does_not_take(tmp_path: Path) -> None:
    assert values_of(written(tmp_path, "a,note,note,b\n1,x,y,2\n")) == [(2, {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("t.json", [{"a": 1}, {"a": None}], [(1, {"a": 1}), (2, {"a": None})]),
        ("t.json", [[1, 2], [3, 4]], [(1, [1, 2]), (2, [3, 4])]),
        ("t.json", [1, 2], [(1, [1, 2])]),
        ("t.json", {"a": 1}, [(1, {"a": 1})]),
        ("t.json", {"rows": [{"a": 1}]}, [(1, {"a": 1})]),
        ("t.json", {"row": [1]}, [(1, [1])]),
        ("t.jsonl", {"a": 1}, [(1, {"a": 1})]),
    ],
)
def test_json(tmp_path: Path, name: str, content: object, rows: list[object]) -> None:
    assert values_of(written(tmp_path, json.dumps(content), name)) == rows


def test_json_lines(tmp_path: Path) -> None:
    path = written(tmp_path, '\ufeff{"a": 1}\r\n\r\n[2]\n{"a": NaN}\n', "t.ndjson")
    assert values_of(path) == [(1, {"a": 1}), (3, [2]), (4, {"a": None})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", "", "expected JSON in UTF-8"),
        ("t.json", "7", "expected an array of rows"),
        ("t.json", '"x"', "expected an array of rows"),
        ("t.json", '{"a": 1, "a": 2}', "duplicate key 'a'"),
        ("t.json", '[{"a": Infinity}]', "Infinity is not a JSON number"),
        ("t.json", "[" * 100_000, "expected JSON"),
        ("t.json", "[" + "9" * 5000 + "]", "expected JSON"),
        ("t.json", b"\xff\xfe[\x00", "expected JSON in UTF-8"),
        ("t.jsonl", '{"a": 1}\n{"a": \n', ":2: expected JSON"),
        ("t.jsonl", '{"a": 1}{"a": 2}\n', ":1: expected JSON"),
        ("t.jsonl", "[" * 100_000 + "\n", ":1: expected JSON"),
    ],
)
def test_json_that_is_none(tmp_path: Path, name: str, content: bytes | str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        values_of(written(tmp_path, content, name))
    assert len(str(caught.value)) < 400


def test_names_and_numbers() -> None:
    assert [is_row_file(name) for name in ("a.CSV", "b.jsonl", "c.npz", "d")] == [True, True, False, False]
    assert number("1,5", comma=True) == 1.5
    assert number("+.5e3") == 500
    assert number(str(1 << 70)) == 1 << 70
    assert number("FALSE") == 0
    for text in ("1.000,5", "1,000,000"):
        with pytest.raises(ValueError, match="expected a number"):
            number(text, comma=True)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for name in ("t.csv", "t.json", "t.jsonl"):
        with pytest.raises(ModelError, match="cannot be read"):
            values_of(tmp_path / name)
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(ModelError, match="cannot be read"):
        values_of(tmp_path / "d.csv")
