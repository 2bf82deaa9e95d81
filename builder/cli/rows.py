"""`run` and `infer` with a table: an answer for each row, printed or written as a table."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.errors import EdgeError
from agent.terminal import note, redraw, say, say_json
from builder.cli import EXIT_INPUT
from builder.cli.asking import ask_each
from builder.cli.failures import Failures
from builder.errors import BuildError, ModelError

if TYPE_CHECKING:
    from builder.bundles.package import Package
    from builder.running.row_answers import Cells
    from builder.running.row_file import Row as FileRow
    from builder.running.row_file import RowFile
    from edgebundle.answer import Answer
    from edgebundle.broker import Broker

ROW_FOR_ROW: Final = "give a table with one answer for each row, in the order of the rows"

# Labels that the summary counts.
_MOST_LABELS: Final = 8
_BETWEEN_PROGRESS_S: Final = 0.1


def run_rows(args: argparse.Namespace, package: Package, name: str) -> int:
    """Run a model on each row of a table."""
    from agent.errors import InputError
    from agent.runtime.rows import RowReader
    from builder.running.local_run import Runner
    from builder.running.row_answers import cells_of

    for flag in ("print_time", "print_top", "profile", "show_input", "draw", "rpc_tracker"):
        if getattr(args, flag):
            raise ModelError(
                f"--{flag.replace('_', '-')}: expected other inputs, got a table",
                hint=f"leave out --{flag.replace('_', '-')}",
            )
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
            f"{name}: expected a bundle that declares columns for a table, got one without ({shapes:.200})",
            hint=hint,
        )
    reader = RowReader(manifest.columns, manifest.row_inputs, manifest.quantised_inputs)
    table = _Table(args, name, reader.names, [c.name for c in reader.columns if c.categories is not None])
    try:
        table.note(reader.check_names(table.file.header) if table.file.header is not None else ())
    except InputError as error:
        raise ModelError(
            f"{name}: {error}",
            hint=error.hint or "give the table the columns that `edgebundle inspect BUNDLE` lists",
        ) from error
    runner = Runner(package, args.threads)
    labels = package.members.get("labels.txt", b"").decode().splitlines()
    names = [spec.name for spec in manifest.outputs]
    with table:
        for row in table.rows():
            try:
                result = runner(reader.arrays([row.values]))
                answers: Mapping[str, Any]
                if result.answers is not None:
                    answers = result.answers
                else:
                    is_whole = len(names) == len(result.outputs)
                    answers = dict(
                        zip(names if is_whole else result.outputs, result.outputs.values(), strict=True)
                    )
                flat = {key: _flat(value) for key, value in answers.items()}
                table.add(row, cells_of(flat, labels), _ranked(flat, labels))
            except (BuildError, EdgeError) as error:
                table.refuse(row, error)
    return table.finish()


async def infer_rows(args: argparse.Namespace, broker: Broker, name: str) -> int:
    """Ask a model on a device about each row of a table."""
    from builder.running.row_answers import cells_of
    from edgebundle.async_client import AsyncClient
    from edgebundle.request import Request

    async with AsyncClient(broker, progress=note) as client:
        model = client.model(args.agent, args.model)
        columns = (await model.info()).columns
        if not columns:
            raise ModelError(
                f"{args.agent}: {args.model}: expected a model that declares columns for a table, "
                "got one that does not",
                hint="declare them, and deploy it again: edgebundle repack BUNDLE --columns a,b,c",
            )
        names = [column.name for column in columns]
        table = _Table(args, name, names, [each.name for each in columns if each.datatype == "BYTES"])
        if table.file.header is not None:
            missing = [each for each in names if each not in table.file.header]
            if missing:
                raise ModelError(
                    f"{name}: expected {len(names)} columns, missing {', '.join(map(repr, missing[:6]))}",
                    hint="add them, or rename those of the model: edgebundle repack BUNDLE --columns NAMES",
                )
            table.note([each for each in table.file.header if each not in names])

        async def ask(row: _Row) -> Answer:
            return await model.item(Request.row(row.values), deadline_s=args.deadline)

        def take(row: _Row, answer: Answer) -> None:
            flat = {o.name: o.flat() if o.datatype == "BYTES" else _flat(o.values) for o in answer.outputs}
            table.add(row, cells_of(flat), _ranked(flat))

        with table:
            await ask_each(table.rows(), ask, take, table.refuse)
    return table.finish()


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


class _Table:
    """The rows of a file, and what becomes of their answers."""

    def __init__(
        self, args: argparse.Namespace, name: str, names: Sequence[str], texts: Sequence[str]
    ) -> None:
        from builder.running import row_answers
        from builder.running.row_accuracy import RowAccuracy, read_truths
        from builder.running.row_file import open_rows

        self._args = args
        self._names = names
        self._texts = frozenset(texts)
        self.file: RowFile = open_rows(name, names)
        self._stack = ExitStack()
        self._writing = row_answers
        self._output: str | None = args.outputs
        if self._output:
            row_answers.check_name(self._output)
            if Path(self._output).resolve() == Path(name).resolve():
                raise ModelError(
                    f"--outputs: expected another file than the input, got {self._output}",
                    hint="give another name: --outputs answers.csv",
                )
        self._writer: row_answers.RowWriter | None = None
        self._truths: Iterator[str] | None = read_truths(args.accuracy) if args.accuracy else None
        self._accuracy = RowAccuracy()
        self._documents: list[dict[str, object]] = []
        self._counts: Counter[str] = Counter()
        self._done = 0
        self._failures = Failures("rows")
        self._began = self._shown = time.monotonic()

    def __enter__(self) -> None:
        if self._output:
            self._writer = self._stack.enter_context(self._writing.writing(self._output))

    def __exit__(self, *error: Any) -> None:  # noqa: ANN401
        self._stack.__exit__(*error)
        redraw()

    def note(self, extra: Sequence[str]) -> None:
        """Tell which columns of the table the model does not take."""
        from builder.running.row_accuracy import LABEL

        extra = [name for name in extra if name != LABEL or self._truths is None]
        if extra and not self._args.json:
            shown = ", ".join(name[:60] for name in extra[:6]) + (" ..." if len(extra) > 6 else "")
            note(f"columns that the model does not take: {shown}")

    def rows(self) -> Iterator[_Row]:
        """Yield each row that can be read; tell about the others."""
        is_empty = True
        for row in self.file.rows:
            is_empty = False
            self._progress(row.line)
            truth = None if self._truths is None else next(self._truths, None)
            if self._truths is not None and truth is None:
                raise ModelError(
                    f"--accuracy: {self._args.accuracy} has fewer rows than {self.file.path}",
                    hint=ROW_FOR_ROW,
                )
            try:
                values = self._values(row)
            except ValueError as error:
                self._failures.add(f"{self.file.path}:{row.line}", error)
                continue
            yield _Row(row.line, values, truth)
        if self._truths is not None and next(self._truths, None) is not None:
            raise ModelError(
                f"--accuracy: {self._args.accuracy} has more rows than {self.file.path}", hint=ROW_FOR_ROW
            )
        if is_empty:
            raise ModelError(
                f"{self.file.path}: expected rows, got none",
                hint="write a line with the names of the columns, and below it a line for each row",
            )

    def _values(self, row: FileRow) -> dict[str, object] | list[object]:
        from builder.running.row_file import typed

        if self.file.is_text:
            return typed(row.values, self._texts, self._names, comma=self.file.comma)
        if isinstance(row.values, dict | list):
            return row.values
        raise ValueError("expected a row, an object or an array")

    def add(self, row: _Row, cells: Cells, ranked: Sequence[Sequence[str]]) -> None:
        """Take the answer about a row."""
        if row.truth is not None:
            self._accuracy.add(cells, ranked, row.truth)
        self._done += 1
        self._counts.update([str(cells["label"])] if "label" in cells else [])
        if self._writer is not None:
            self._writer.write(row.line, cells)
        elif self._args.json:
            self._documents.append({"line": row.line, **cells})
        elif self._truths is None:
            redraw()
            say(f"{row.line:6}  {self._writing.shown(cells)}")

    def refuse(self, row: _Row, error: Exception) -> None:
        """Take the error of a row."""
        self._failures.add(f"{self.file.path}:{row.line}", error)

    def finish(self) -> int:
        """Print the summary, and return the exit code."""
        self._failures.end()
        if self._args.json:
            document: dict[str, object] = {"rows": self._done, "failed": self._failures.count}
            if self._writer is None and self._truths is None:
                document["results"] = self._documents
            if self._truths is not None:
                document["accuracy"] = self._accuracy.document()
            say_json(document)
        else:
            note(self._summary())
            if self._truths is not None:
                say(self._accuracy)
        return EXIT_INPUT if self._failures.count else 0

    def _summary(self) -> str:
        seconds = time.monotonic() - self._began
        each_ms = 1e3 * seconds / max(1, self._done)
        parts = [
            f"{self._done} row{'' if self._done == 1 else 's'} in {seconds:.1f} s, {each_ms:.1f} ms each"
        ]
        most = self._counts.most_common(_MOST_LABELS)
        if most:
            more = f" and {len(self._counts) - len(most)} more" if len(self._counts) > len(most) else ""
            parts.append(", ".join(f"{count} {label}" for label, count in most) + more)
        if self._failures.count:
            parts.append(f"{self._failures.count} could not be used")
        if self._output:
            parts.append(f"written to {self._output}")
        return "; ".join(parts)

    def _progress(self, line: int) -> None:
        now = time.monotonic()
        if now - self._shown >= _BETWEEN_PROGRESS_S:
            self._shown = now
            redraw(f"line {line}")


def _flat(value: Any) -> Sequence[Any]:  # noqa: ANN401 - an array, or texts
    return value if isinstance(value, tuple) else value.reshape(-1)


def _ranked(values: Mapping[str, Sequence[Any]], known: Sequence[str] = ()) -> list[list[str]]:
    """Return the names of each class in an answer, best first: its label and its number.

    An answer of trees has the number of one class, which is its place among the `known` labels.
    """
    prefix = next((name.removesuffix("indices") for name in values if name.endswith("indices")), None)
    if prefix is None:
        places = next((v for name, v in values.items() if name.endswith("label") and len(v) == 1), ())
        numbers = [place.item() if hasattr(place, "item") else place for place in places]
        return [
            [known[each], str(each)] for each in numbers if isinstance(each, int) and 0 <= each < len(known)
        ]
    numbers = [str(int(number)) for number in values[f"{prefix}indices"]]
    labels = values.get(f"{prefix}labels")
    if labels is None:
        return [[number] for number in numbers]
    texts = [label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label) for label in labels]
    return [[text, number] for text, number in zip(texts, numbers, strict=True)]
