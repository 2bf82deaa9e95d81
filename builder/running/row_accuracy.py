"""How often answers about rows are right, or how far off numbers are, from a table of what is true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from builder.errors import ModelError
from builder.running.accuracy import ranks
from builder.running.row_answers import Cells
from builder.running.row_file import number, open_rows

LABEL: Final = "label"


def read_truths(path: str | Path) -> Iterator[str]:
    """Yield what is true of each row, in order.

    Parameters
    ----------
    path
        A table with a column `label`, or with one column; or JSON rows with a key `label`.

    Raises
    ------
    ModelError
        If it cannot be read, or has no such column.
    """
    file = open_rows(path, (LABEL,))
    if file.header is not None and LABEL not in file.header and len(file.header) > 1:
        raise ModelError(
            f"{path}: expected a column {LABEL!r}, got {', '.join(file.header)[:200]}",
            hint="rename the column that has the truth to label",
        )
    for row in file.rows:
        values = row.values
        if isinstance(values, dict):
            value = values.get(LABEL, next(iter(values.values()), None) if len(values) == 1 else None)
        else:
            value = values[0] if isinstance(values, list) and len(values) == 1 else None
        if not isinstance(value, str | int | float):
            raise ModelError(
                f"{path}:{row.line}: expected a row with {LABEL!r}, got another one",
                hint=f"add a column {LABEL!r} with the right answer of each row",
            )
        yield str(value).strip()


@dataclass(slots=True)
class RowAccuracy:
    """Counts of right answers, or sums of errors.

    Attributes
    ----------
    rows
        Number of rows.
    top1, top5
        For how many the right class was the best one, or among the five best of those in the answer.
    classes
        The largest number of classes in an answer; top-5 says something only from five on.
    absolute, squared
        Sums of errors, for a model that answers with a number.
    """

    rows: int = 0
    top1: int = 0
    top5: int = 0
    classes: int = 0
    absolute: float = 0.0
    squared: float = 0.0
    is_number: bool = False

    def add(self, cells: Cells, ranked: Sequence[Sequence[str]], truth: str) -> None:
        """Count one answer.

        Parameters
        ----------
        cells
            The answer, as `builder.running.row_answers.cells_of` makes it.
        ranked
            The names of each class in the answer, best first; none if it has no classes.
        truth
            The right class, or the right number.

        Raises
        ------
        ModelError
            If the answer has neither classes nor one number.
        """
        label = next((value for name, value in cells.items() if name.endswith(LABEL)), None)
        if ranked or label is not None:
            found = [truth in names for names in (ranked or [[str(label)]])[:5]]
            self.top1 += found[0]
            self.top5 += any(found)
            self.classes = max(self.classes, len(ranked))
            self.rows += 1
            return
        value = next(iter(cells.values()), None) if len(cells) == 1 else None
        try:
            right = number(truth)
        except ValueError:
            right = None
        if not isinstance(value, int | float) or right is None:
            raise ModelError(
                "--accuracy: expected an answer with classes, or one number for a number, got another one",
                hint="declare the classes: edgebundle repack BUNDLE --postprocess top1",
            )
        self.is_number = True
        self.rows += 1
        self.absolute += abs(value - right)
        self.squared += (value - right) ** 2

    def document(self) -> dict[str, float]:
        """Return the numbers as JSON."""
        if self.is_number:
            return {"rows": self.rows, "mean_absolute_error": self._mean, "root_mean_square": self._root}
        return {"rows": self.rows, "top1": self.top1, "top5": self.top5}

    def __str__(self) -> str:
        count = f"{self.rows} row{'' if self.rows == 1 else 's'}"
        if self.is_number:
            return f"mean absolute error {self._mean:.6g}, root mean square {self._root:.6g} of {count}"
        return f"{ranks(self.top1, self.top5, self.rows, self.classes)} of {count}"

    @property
    def _mean(self) -> float:
        return self.absolute / max(1, self.rows)

    @property
    def _root(self) -> float:
        return math.sqrt(self.squared / max(1, self.rows))
