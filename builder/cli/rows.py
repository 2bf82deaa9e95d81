"""`run` and `infer` with a table: an answer for each row, printed or written as a table."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.terminal import note, redraw, say, say_json
from builder.cli import EXIT_INPUT
from builder.cli.answers import Computed
from builder.cli.asking import ask_each
from builder.cli.tally import Tally
from builder.errors import ModelError

if TYPE_CHECKING:
    from builder.bundles.package import Package
    from builder.running.row_answers import RowWriter
    from builder.running.row_file import Row as FileRow
    from builder.running.row_file import RowFile
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel

ROW_FOR_ROW: Final = "give a table with one answer for each row, in the order of the rows"
ONE_TABLE: Final = "give one table at a time, or write the rows of all into one file"

_BETWEEN_PROGRESS_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Table:
    """A table, and what is done with the answers about its rows.

    `path`: the file of the rows.
    `outputs`: the file that the answers are written to, or None.
    `accuracy`: the table that says what is right, or None.
    """

    path: str
    outputs: str | None
    accuracy: str | None
    as_json: bool


def run_rows(table: Table, package: Package, threads: int | None) -> int:
    """Run a model on each row of a table."""
    from agent.errors import InputError
    from agent.runtime.rows import RowReader
    from builder.running.local_run import Runner

    manifest = package.manifest
    if manifest.columns is None:
        shapes = ", ".join(map(str, manifest.inputs))
        hint = "name them in the order of the model's features: edgebundle repack BUNDLE --columns a,b,c"
        if manifest.preprocess is not None:
            hint = "the model takes pictures: give --inputs a JPEG or PNG file"
        elif manifest.audio is not None:
            hint = "the model takes recordings: give --inputs a .wav file"
        elif all(len(spec.shape) > 2 for spec in manifest.inputs):
            hint = "no input of the model is a row: give --inputs an .npz file"
        raise ModelError(
            f"{table.path}: expected a bundle that declares columns for a table, "
            f"got one without ({shapes:.200})",
            hint=hint,
        )
    reader = RowReader(manifest.columns, manifest.row_inputs, manifest.quantised_inputs)
    labels = [line.decode() for line in package.members.get("labels.txt", b"").splitlines()]
    texts = [column.name for column in reader.columns if column.categories is not None]
    rows = _Rows(table, reader.names, texts, labels)
    try:
        rows.note(reader.check_names(rows.file.header) if rows.file.header is not None else ())
    except InputError as error:
        raise ModelError(
            f"{table.path}: {error}",
            hint=error.hint or "give the table the columns that `edgebundle inspect BUNDLE` lists",
        ) from error
    runner = Runner(package, threads)

    async def ask(row: _Row) -> Answer:
        return Computed.of(package, runner(reader.arrays([row.values])))

    with rows:
        asyncio.run(ask_each(rows, ask))
    return rows.finish()


async def infer_rows(table: Table, model: AsyncModel, deadline_s: float) -> int:
    """Ask a model on a device about each row of a table."""
    from edgebundle.defaults import IN_FLIGHT
    from edgebundle.request import Request

    columns = (await model.info()).columns
    if not columns:
        raise ModelError(
            f"{model.agent}: {model.name}: expected a model that declares columns for a table, "
            "got one that does not",
            hint="declare them, and deploy it again: edgebundle repack BUNDLE --columns a,b,c",
        )
    names = [column.name for column in columns]
    rows = _Rows(table, names, [each.name for each in columns if each.datatype == "BYTES"])
    if rows.file.header is not None:
        missing = [each for each in names if each not in rows.file.header]
        if missing:
            raise ModelError(
                f"{table.path}: expected {len(names)} columns, missing {', '.join(map(repr, missing[:6]))}",
                hint="add them, or rename those of the model: edgebundle repack BUNDLE --columns NAMES",
            )
        rows.note([each for each in rows.file.header if each not in names])

    async def ask(row: _Row) -> Answer:
        return await model.item(Request.row(row.values), deadline_s=deadline_s)

    with rows:
        await ask_each(rows, ask, IN_FLIGHT)
    return rows.finish()


def is_rows(name: str) -> bool:
    """Return whether a file has rows; a `.json` file may be a request with tensors instead."""
    from builder.running.row_file import MAX_JSON_BYTES, ROW_SUFFIXES

    path = Path(name)
    suffix = path.suffix.lower()
    if suffix != ".json" or not path.is_file() or path.stat().st_size > MAX_JSON_BYTES:
        return suffix in ROW_SUFFIXES and suffix != ".json"
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return True  # whose reader says what is wrong
    return not (isinstance(document, dict) and isinstance(document.get("inputs"), list))


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that is asked about, and what is true of it, if that is known."""

    line: int
    values: dict[str, object] | list[object]
    truth: str | None


class _Rows:
    """The rows of a table, and what becomes of their answers."""

    def __init__(
        self, table: Table, names: Sequence[str], texts: Sequence[str], labels: Sequence[str] = ()
    ) -> None:
        from builder.running.row_accuracy import RowAccuracy, read_truths
        from builder.running.row_answers import check_name
        from builder.running.row_file import open_rows

        self._table = table
        self._names = names
        self._texts = frozenset(texts)
        self._labels = labels
        self.file: RowFile = open_rows(table.path, names)
        self._stack = ExitStack()
        if table.outputs:
            check_name(table.outputs)
            if Path(table.outputs).resolve() == Path(table.path).resolve():
                raise ModelError(
                    f"--outputs: expected another file than the input, got {table.outputs}",
                    hint="give another name: --outputs answers.csv",
                )
        self._writer: RowWriter | None = None
        self._truths: Iterator[str] | None = read_truths(table.accuracy) if table.accuracy else None
        self._accuracy = RowAccuracy()
        self._documents: list[dict[str, object]] = []
        self._tally = Tally("row")
        self._shown = time.monotonic()

    def __enter__(self) -> None:
        from builder.running.row_answers import writing

        if self._table.outputs:
            self._writer = self._stack.enter_context(writing(self._table.outputs))

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._stack.__exit__(*error)
        redraw()

    def note(self, extra: Sequence[str]) -> None:
        """Tell which columns of the table the model does not take."""
        from builder.running.row_accuracy import LABEL

        extra = [name for name in extra if name != LABEL or self._truths is None]
        if extra and not self._table.as_json:
            shown = ", ".join(name[:60] for name in extra[:6]) + (" ..." if len(extra) > 6 else "")
            note(f"columns that the model does not take: {shown}")

    def __iter__(self) -> Iterator[_Row]:
        """Yield each row that can be read; tell about the others."""
        path, truths = self.file.path, self._truths
        is_empty = True
        for row in self.file.rows:
            is_empty = False
            self._progress(row.line)
            truth = None if truths is None else next(truths, None)
            if truths is not None and truth is None:
                raise ModelError(
                    f"--accuracy: {self._table.accuracy} has fewer rows than {path}", hint=ROW_FOR_ROW
                )
            try:
                values = self._values(row)
            except ValueError as error:
                self._tally.refuse(f"{path}:{row.line}", error)
                continue
            yield _Row(row.line, values, truth)
        if truths is not None and next(truths, None) is not None:
            raise ModelError(
                f"--accuracy: {self._table.accuracy} has more rows than {path}", hint=ROW_FOR_ROW
            )
        if is_empty:
            raise ModelError(
                f"{path}: expected rows, got none",
                hint="write a line with the names of the columns, and below it a line for each row",
            )

    def _values(self, row: FileRow) -> dict[str, object] | list[object]:
        from builder.running.row_file import typed

        if self.file.is_text:
            return typed(row.values, self._texts, self._names, comma=self.file.comma)
        if isinstance(row.values, dict | list):
            return row.values
        raise ValueError("expected a row, an object or an array")

    def add(self, item: _Row, answer: Answer) -> None:
        """Take the answer about a row."""
        from builder.running.row_answers import cells_of, ranked, shown

        cells = cells_of(answer, self._labels)
        if item.truth is not None:
            self._accuracy.add(cells, ranked(answer, self._labels), item.truth)
        self._tally.add([str(cells["label"])] if "label" in cells else [])
        if self._writer is not None:
            self._writer.write(item.line, cells)
        elif self._table.as_json:
            self._documents.append({"line": item.line, **cells})
        elif self._truths is None:
            redraw()
            say(f"{item.line:6}  {shown(cells)}")

    def refuse(self, item: _Row, error: Exception) -> None:
        """Take the error of a row."""
        self._tally.refuse(f"{self.file.path}:{item.line}", error)

    def finish(self) -> int:
        """Print the summary, and return the exit code."""
        summary, failed = self._tally.end(), self._tally.failed
        if self._table.as_json:
            document: dict[str, object] = {"rows": self._tally.answered, "failed": failed}
            if self._writer is None and self._truths is None:
                document["results"] = self._documents
            if self._truths is not None:
                document["accuracy"] = self._accuracy.document()
            say_json(document)
        else:
            note(summary + (f"; written to {self._table.outputs}" if self._table.outputs else ""))
            if self._truths is not None:
                say(self._accuracy)
        return EXIT_INPUT if failed else 0

    def _progress(self, line: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _BETWEEN_PROGRESS_S:
            self._shown = now
            redraw(f"line {line}")
