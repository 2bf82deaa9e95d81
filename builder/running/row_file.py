"""Rows from a file: CSV with a comma, a semicolon or a tab, JSON, or JSON with one row a line.

Promises rows one after the other, each with its line, without reading them all into memory; a file that is no
table is one error. Leaves what a row must have to `agent.runtime.rows`.

A cell of a table is text. `number` says which number it is, as spreadsheets and data frames write it: with a
decimal comma if the separator is not a comma, `true` and `false`, and for a missing value nothing, `NA`,
`NaN` or `null`.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.bundle.columns import MAX_COLUMNS
from agent.bundle.strict_json import unique_object
from builder.errors import ModelError
from builder.spelling import READABLE

_TABLE: Final = "write the names of the columns into the first line, and below it a line for each row"
_JSON: Final = 'write [{"COLUMN": 1.5}, ...] in UTF-8, or an object a line in a .jsonl file'

MAX_FILE_BYTES: Final = 256 << 20
# A JSON file is read as a whole, and takes some twenty times its size in memory.
MAX_JSON_BYTES: Final = 64 << 20
TABLE_SUFFIXES: Final = (".csv", ".tsv")
JSON_SUFFIXES: Final = (".json", ".jsonl", ".ndjson")
ROW_SUFFIXES: Final = (*TABLE_SUFFIXES, *JSON_SUFFIXES)

# A table may have columns that the model does not take, but not any number of them.
_MAX_CELLS: Final = 4 * MAX_COLUMNS
# A row of that many cells of 256 characters; a text with line breaks in quotes may have some lines.
_MAX_LINE_CHARACTERS: Final = 4 << 20
_MAX_LINES: Final = 100
_SEPARATORS: Final = ",;\t"
_NUMBER: Final = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,5})?", re.ASCII)
_MISSING: Final = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none"})
_TRUTH: Final = {"true": 1, "false": 0}
_MAX_NUMBER_CHARACTERS: Final = 400
_UTF16: Final = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a file.

    Attributes
    ----------
    line
        Where it begins, from 1; in a JSON array its place, from 1.
    values
        Texts by column, texts in their order, or what a JSON value became.
    """

    line: int
    values: Any


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows, open for reading.

    Attributes
    ----------
    path
        The file.
    header
        Names of the columns, or None if the file has none: rows are then in the order of the model's columns.
    rows
        The rows.
    is_text
        Whether values are the texts of a table's cells.
    comma
        Whether a number may have a decimal comma.
    """

    path: Path
    header: tuple[str, ...] | None
    rows: Iterator[Row]
    is_text: bool
    comma: bool = False


def is_row_file(name: str | Path) -> bool:
    """Return whether a file's name ends like a table's or like JSON's."""
    return Path(name).suffix.lower() in ROW_SUFFIXES


def open_rows(path: str | Path, known: Sequence[str] = ()) -> RowFile:
    """Open a file of rows.

    Parameters
    ----------
    path
        A `.csv`, `.tsv`, `.json`, `.jsonl` or `.ndjson` file.
    known
        Names of columns. A table's first line is its header if it has one of them, or a cell that is no
        number.

    Raises
    ------
    ModelError
        If it cannot be read, or is no table. The rows raise it, too, at the line that is wrong.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".json":
        return RowFile(path, None, _json_rows(path), is_text=False)
    if suffix in JSON_SUFFIXES:
        return RowFile(path, None, _json_lines(path), is_text=False)
    lines = _lines(path)
    separator, records = _records(path, lines)
    first = next(records, None)
    if first is None:
        raise ModelError(f"{path}: expected a table, got an empty file", hint=_TABLE)
    cells = [cell.strip() for cell in first[1]]
    comma = separator != ","
    if set(cells).isdisjoint(known) and all(_is_value(cell, comma=comma) for cell in cells):
        rows = _table_rows(path, None, len(cells), first, records)
        return RowFile(path, None, rows, is_text=True, comma=comma)
    header = tuple(cells)
    for name in (known or header) if len(set(header)) != len(header) else ():
        if name and header.count(name) > 1:
            raise ModelError(
                f"{path}: expected each column once, got {name!r:.80} twice in the first line",
                hint="give each column a name of its own, or leave out one of them",
            )
    rows = _table_rows(path, header, len(cells), None, records)
    return RowFile(path, header, rows, is_text=True, comma=comma)


def read_header(path: str | Path) -> tuple[str, ...]:
    """Return the names in a table's first line.

    Raises
    ------
    ModelError
        If the file cannot be read, or its first line has only numbers.
    """
    header = open_rows(path).header
    if header is None:
        raise ModelError(f"{path}: expected names in the first line, got numbers", hint=_TABLE)
    return header


def number(text: str, *, comma: bool = False) -> float | int | None:
    """Return the number in a cell; None for a missing value.

    `comma`: whether `21,5` is a number.
    Raises `ValueError` if it is neither.
    """
    text = text.strip()
    if text.lower() in _MISSING:
        return None
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    if comma and text.count(",") == 1 and "." not in text:
        text = text.replace(",", ".")
    if len(text) > _MAX_NUMBER_CHARACTERS or not _NUMBER.fullmatch(text):
        raise ValueError(f"expected a number, got {text!r:.60}")
    return float(text) if re.search("[.eE]", text) else int(text)


def typed(
    values: object, texts: Collection[str], names: Sequence[str], *, comma: bool = False
) -> dict[str, object] | list[object]:
    """Return a table's cells as the values of a row: numbers, and texts for columns that take texts.

    Parameters
    ----------
    values
        Texts by column, or in the order of `names`.
    texts
        The columns that take texts.
    names
        The model's columns.
    comma
        As for `number`.

    Raises
    ------
    ValueError
        If a cell of a column with numbers has none. Cells of other columns are left out.
    """
    if isinstance(values, Mapping):
        return {name: _cell(name, values[name], texts, comma) for name in names if name in values}
    assert isinstance(values, list)
    places = names if len(names) == len(values) else [f"{place + 1}" for place in range(len(values))]
    return [_cell(name, value, texts, comma) for name, value in zip(places, values, strict=True)]


def _cell(name: str, text: str, texts: Collection[str], comma: bool) -> object:
    if name in texts:
        return text.strip() or None
    try:
        return number(text, comma=comma)
    except ValueError as error:
        raise ValueError(f"column {name!r:.80}: {error}") from error


def _is_value(cell: str, *, comma: bool) -> bool:
    try:
        number(cell, comma=comma)
    except ValueError:
        return False
    return True


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, decoded, each with its end."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_FILE_BYTES} bytes, got {size}",
                hint="give the rows in several files",
            )
        with path.open("rb") as file:
            encoding = "utf-16" if file.read(2) in _UTF16 else "utf-8-sig"
        with path.open(encoding=encoding, newline="") as text:
            count = 0
            while line := text.readline(_MAX_LINE_CHARACTERS + 1):
                count += 1
                if len(line) > _MAX_LINE_CHARACTERS:
                    raise ModelError(
                        f"{path}:{count}: expected a line of at most {_MAX_LINE_CHARACTERS} characters",
                        hint="end each row with a line break",
                    )
                if "\0" in line:
                    raise ModelError(
                        f"{path}:{count}: expected text, got a zero byte",
                        hint="save it as UTF-8 text: iconv -f utf-16 -t utf-8 TABLE",
                    )
                yield line
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})", hint=READABLE) from error
    except UnicodeError as error:
        raise ModelError(
            f"{path}: expected text in UTF-8, got other bytes",
            hint=f"convert it: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > utf8.csv",
        ) from error


def _records(path: Path, lines: Iterator[str]) -> tuple[str, Iterator[tuple[int, list[str]]]]:
    """Return the separator, and the records of a table with the lines on which they begin."""
    blank, first = 0, ""
    for first in lines:
        if first.strip():
            break
        blank += 1
    bare = re.sub(r'"[^"]*"', "", first)
    separator = max(_SEPARATORS, key=bare.count)
    if path.suffix.lower() == ".tsv":
        separator = "\t"
    return separator, _split(path, blank, first, lines, separator)


def _split(
    path: Path, blank: int, first: str, lines: Iterator[str], separator: str
) -> Iterator[tuple[int, list[str]]]:
    """Yield the records of a table; `first` is its first line that is not blank, after `blank` others."""
    taken, pending = blank, 0

    def feed() -> Iterator[str]:
        nonlocal taken, pending
        for line in (each for group in ((first,), lines) for each in group):
            taken += 1
            pending += 1
            if line.count(separator) >= _MAX_CELLS:
                raise ModelError(
                    f"{path}:{taken}: expected at most {_MAX_CELLS} columns, got more",
                    hint="leave out the columns that the model does not read",
                )
            if pending > _MAX_LINES:
                raise ModelError(
                    f"{path}:{taken - pending + 1}: expected a row of at most {_MAX_LINES} lines, got more",
                    hint="a quotation mark may be missing",
                )
            yield line

    if not first.strip():
        return
    reader = csv.reader(feed(), delimiter=separator, strict=True)
    while True:
        pending = 0
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ModelError(
                f"{path}:{taken}: expected a table with {separator!r} ({error})",
                hint="close each quote, and double the quotes inside a cell",
            ) from error
        if any(cell.strip() for cell in record):
            yield taken - pending + 1, record


def _table_rows(
    path: Path,
    header: tuple[str, ...] | None,
    width: int,
    first: tuple[int, list[str]] | None,
    records: Iterator[tuple[int, list[str]]],
) -> Iterator[Row]:
    if first is not None:
        yield Row(first[0], first[1])
    for line, cells in records:
        if len(cells) != width:
            raise ModelError(
                f"{path}:{line}: expected {width} cells, got {len(cells)}",
                hint="write a cell for each column, an empty one for a missing value",
            )
        yield Row(line, cells if header is None else dict(zip(header, cells, strict=True)))


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_JSON_BYTES} bytes, got {size}",
                hint="write one row a line, and name the file .jsonl",
            )
        document = _parse(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})", hint=READABLE) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: expected JSON in UTF-8: {str(error)[:200]}", hint=_JSON) from error
    if isinstance(document, dict):
        rows = document.get("rows")
        row = document.get("row")
        document = rows if isinstance(rows, list) else [row if isinstance(row, dict | list) else document]
    if not isinstance(document, list):
        raise ModelError(f"{path}: expected an array of rows, got {type(document).__name__}", hint=_JSON)
    if document and not isinstance(document[0], dict | list):
        document = [document]
    for place, each in enumerate(document, 1):
        yield Row(place, each)


def _json_lines(path: Path) -> Iterator[Row]:
    for count, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            yield Row(count, _parse(line.encode()))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}:{count}: expected JSON: {str(error)[:200]}", hint=_JSON) from error


def _parse(raw: bytes) -> Any:  # noqa: ANN401 - as json.loads
    return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=unique_object, parse_constant=_constant)


def _constant(name: str) -> None:
    # Python writes a missing value as NaN.
    if name != "NaN":
        raise ValueError(f"{name} is not a JSON number")
