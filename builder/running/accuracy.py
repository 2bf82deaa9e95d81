"""Accuracy of a classifier on pictures whose classes are known.

Promises the two usual numbers: how often the right class is the best one, and how often it is among the five
best. They come from the model's first output, before labels and thresholds.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from builder.errors import ModelError
from builder.spelling import similar_file

_HINT: Final = "write a line for each picture, such as seven.png,7"

MAX_TABLE_BYTES: Final = 64 << 20
TOP: Final = 5


@dataclass(frozen=True, slots=True)
class Truth:
    """A picture and its class.

    Attributes
    ----------
    file
        The picture.
    label
        The name of its class, or the class's number.
    index
        The class's number, from 0; None if the model's labels are not known.
    name
        The picture as the table names it.
    """

    file: Path
    label: str
    index: int | None = None
    name: str = field(default="", compare=False)


def read_truths(path: str | Path, labels: Sequence[str] | None) -> list[Truth]:
    """Read a CSV table of two columns: a file, relative to the table's folder, and its label or class index.

    Parameters
    ----------
    path
        The table. A first row `file,label` is a heading.
    labels
        The model's labels; empty if it has none, and the table then has indices. None if they are not known.

    Raises
    ------
    ModelError
        If the table cannot be read, has no rows, or names a class that the model does not have.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise ModelError(f"{path}: expected at most {MAX_TABLE_BYTES} bytes", hint=_HINT)
        rows = list(csv.reader(path.read_text("utf-8-sig").splitlines()))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ModelError(
            f"{path}: expected a CSV table ({error})", hint=similar_file(path, otherwise=_HINT)
        ) from error
    known = {label: index for index, label in reversed(list(enumerate(labels or ())))}
    found = []
    for number, row in enumerate(rows, 1):
        cells = [cell.strip() for cell in row]
        if not any(cells) or (number == 1 and cells[:2] == ["file", "label"]):
            continue
        if len(cells) != 2:
            raise ModelError(
                f"{path}:{number}: expected a file and a label, got {len(cells)} columns", hint=_HINT
            )
        label = cells[1]
        index = known.get(label)
        if index is None and label.isascii() and label.isdigit() and len(label) < 9:
            index = int(label)
        if index is None and labels is not None:
            raise ModelError(
                f"{path}:{number}: expected a label of the model or a class index, got {label[:80]!r}",
                hint=f"the model's labels begin with {', '.join(labels[:5])}" if labels else _HINT,
            )
        found.append(Truth(path.parent / cells[0], label, index, cells[0]))
    if not found:
        raise ModelError(f"{path}: expected rows of a file and a label, got none", hint=_HINT)
    return found


def truths_of(paths: Iterable[Path], truths: Sequence[Truth], table: str) -> list[Truth]:
    """Return the rows of each picture, in the order of the pictures.

    A row is of a picture if it names that file, or, since the table may lie elsewhere, the end of its path.

    Parameters
    ----------
    paths
        The pictures.
    truths
        All rows of the table.
    table
        The table, for messages.

    Raises
    ------
    ModelError
        If a picture has no row, or its row may be of another picture, too.
    """
    by_file: dict[Path, list[Truth]] = defaultdict(list)
    by_name: dict[Path, list[Truth]] = defaultdict(list)
    for truth in truths:
        by_file[truth.file.resolve()].append(truth)
        by_name[Path(truth.name)].append(truth)
    taken: dict[Path, Path] = {}
    found = []
    for path in paths:
        whole = path.resolve()
        ends = (Path(*whole.parts[at:]) for at in range(1, len(whole.parts)))
        rows = by_file.get(whole) or next((by_name[end] for end in ends if end in by_name), None)
        if rows is None:
            raise ModelError(
                f"--accuracy: {table} has no row for {path}",
                hint="add the line FILE,LABEL, or leave out --inputs to take the files of the table",
            )
        other = taken.setdefault(rows[0].file, path)
        if other.resolve() != whole:
            raise ModelError(
                f"--accuracy: {table} has one row for {other} and {path}: {rows[0].name}",
                hint="write the files into the table with their folders",
            )
        found += [replace(truth, file=path) for truth in rows]
    return found


def is_right(scores: npt.NDArray[Any], truth: Truth) -> tuple[bool, bool, int]:
    """Return whether the right class is the best one, or among the five best, and how many classes there are.

    Parameters
    ----------
    scores
        The model's first output, with one value for each class.
    truth
        The picture, with the number of its class.

    Raises
    ------
    ModelError
        If the model does not have the picture's class.
    """
    flat = scores.reshape(-1)
    if truth.index is None or truth.index >= flat.size:
        raise ModelError(
            f"{truth.file}: expected a class below {flat.size}, got {truth.label}",
            hint="count the classes from 0, as the model's output does, or give names that are in its labels",
        )
    best = np.argsort(-flat.astype(np.float64), kind="stable")[:TOP]
    return bool(best[0] == truth.index), truth.index in best, flat.size


@dataclass(slots=True)
class Accuracy:
    """Counts of right answers.

    Attributes
    ----------
    pictures
        Number of pictures.
    top1, top5
        For how many the right class was the best one, or among the five best.
    classes
        The largest number of classes in an answer.
    """

    pictures: int = 0
    top1: int = 0
    top5: int = 0
    classes: int = 0

    def count(self, is_best: bool, is_among_the_best: bool, classes: int) -> None:
        """Count one answer by where the right class is among so many."""
        self.classes = max(self.classes, classes)
        self.pictures += 1
        self.top1 += is_best
        self.top5 += is_among_the_best

    def document(self) -> dict[str, int]:
        """Return the counts as JSON."""
        return {"pictures": self.pictures, "top1": self.top1, "top5": self.top5}

    def __str__(self) -> str:
        return f"{ranks(self.top1, self.top5, self.pictures, self.classes)} of {self.pictures} pictures"


def ranks(top1: int, top5: int, count: int, classes: int) -> str:
    """Return the shares of right answers; top-5 only where an answer has as many classes."""
    shares = [f"{100 * right / max(1, count):.1f} %" for right in (top1, top5)]
    return f"top-1 {shares[0]}" + (f", top-5 {shares[1]}" if classes >= TOP else "")
