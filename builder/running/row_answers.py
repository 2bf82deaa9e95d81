"""Answers about rows, as a table: a label and its probability, or the outputs' values, one row for each row.

Promises a file that is whole or absent: it is written beside its place and renamed at the end.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, TypeAlias

from agent.durable import replacing
from agent.terminal import Cell, cell_of
from builder.errors import ModelError

if TYPE_CHECKING:
    from edgebundle.answer import Answer

Cells: TypeAlias = Mapping[str, Cell]

SUFFIXES: Final = (".csv", ".tsv", ".json", ".jsonl", ".ndjson")
# Values of one output that become cells; a model for rows has some classes.
_MOST_VALUES: Final = 4096


def cells_of(answer: Answer, labels: Sequence[str] = ()) -> dict[str, Cell]:
    """Return an answer as cells.

    Parameters
    ----------
    answer
        The answer.
    labels
        The model's labels, for an output `label` that has a place among them.

    Returns
    -------
    dict
        `label` and `probability` of the best class, if the answer has a list of classes; otherwise each
        value under its output's name, numbered from 0 if the output has several.

    Raises
    ------
    ModelError
        If an output has too many values for a table.
    """
    if answer.labels:
        best, prefix = answer.labels[0], answer.lists("indices")[0]
        score = _cell(best.score, answer.output(f"{prefix}scores").datatype)
        return {"label": best.label if f"{prefix}labels" in set(answer) else best.index, "probability": score}
    cells: dict[str, Cell] = {}
    for output in answer.outputs:
        name, count = output.name, math.prod(output.shape)
        if count > _MOST_VALUES:
            raise ModelError(
                f"output {name!r:.80}: expected at most {_MOST_VALUES} values for a table, got {count}",
                hint="write the tensors: --outputs out.npz",
            )
        values = [_cell(value, output.datatype) for value in output.flat()]
        place = values[0] if len(values) == 1 and name.endswith("label") else None
        if isinstance(place, int) and 0 <= place < len(labels):
            values = [labels[place]]
        cells |= {name if len(values) == 1 else f"{name}_{i}": value for i, value in enumerate(values)}
    return cells


def ranked(answer: Answer, labels: Sequence[str] = ()) -> list[list[str]]:
    """Return the names of each class in an answer, best first: its label and its number.

    An answer of trees has the number of one class, which is its place among the model's `labels`.
    """
    if answer.labels:
        return [[each.label, str(each.index)] for each in answer.labels]
    for output in answer.outputs:
        if output.name.endswith("label") and math.prod(output.shape) == 1:
            (place,) = output.flat()
            if isinstance(place, int) and 0 <= place < len(labels):
                return [[labels[place], str(place)]]
    return []


def shown(cells: Cells) -> str:
    """Return cells as a line for people."""
    if cells.keys() == {"label", "probability"}:
        return f"{cells['probability']:.4f}  {cells['label']}"
    words = [f"{value:.6g}" if isinstance(value, float) else str(value) for value in cells.values()]
    pairs = [f"{name} {word}" for name, word in zip(cells, words, strict=True)]
    return ", ".join(pairs[:8]) + (", ..." if len(pairs) > 8 else "")


@contextmanager
def writing(path: str | Path) -> Iterator[RowWriter]:
    """Write a table of answers: CSV, or JSON with an array or with one object a line, by the file's suffix.

    Raises
    ------
    ModelError
        If the suffix is none of these.
    """
    path = Path(path)
    check_name(path)
    with replacing(path) as file:
        writer = RowWriter(file, path.suffix.lower())
        yield writer
        writer.end()


def check_name(path: str | Path) -> None:
    """Check that a table can be written under this name.

    Raises
    ------
    ModelError
        If its suffix is another, or its folder does not exist.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ModelError(
            f"{path}: expected a name that ends in {', '.join(SUFFIXES)}", hint=f"use {path.stem}.csv"
        )
    if not path.parent.is_dir():
        raise ModelError(
            f"{path}: the folder {path.parent} does not exist", hint=f"make it: mkdir -p {path.parent}"
        )


class RowWriter:
    """Writes cells to a file, row after row; `writing` makes it."""

    def __init__(self, file: IO[bytes], suffix: str) -> None:
        self._file = file
        self._suffix = suffix
        self._names: tuple[str, ...] | None = None

    def write(self, line: int, cells: Cells) -> None:
        """Write the answer about the row on a line of the input."""
        row = {"line": line, **cells}
        if self._suffix in (".csv", ".tsv"):
            self._write_cells(row)
            return
        text = json.dumps(row, allow_nan=False)
        if self._suffix == ".json":
            text = (",\n " if self._names else "[\n ") + text
        else:
            text += "\n"
        self._names = tuple(row)
        self._file.write(text.encode())

    def end(self) -> None:
        """Write what comes after the last row."""
        if self._suffix == ".json":
            self._file.write(b"\n]\n" if self._names else b"[]\n")

    def _write_cells(self, row: Cells) -> None:
        text = io.StringIO()
        table = csv.writer(text, delimiter="\t" if self._suffix == ".tsv" else ",", lineterminator="\n")
        if self._names is None:
            table.writerow([cell_of(name) for name in row])
            self._names = tuple(row)
        table.writerow([cell_of(row.get(name)) for name in self._names])
        self._file.write(text.getvalue().encode())


def _cell(value: float | str, datatype: str) -> Cell:
    if isinstance(value, float) and datatype == "FP32":
        value = float(f"{value:.9g}")  # enough to read it back
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
