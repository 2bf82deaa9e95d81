"""The report of a profile, as a table, JSON or CSV, with the columns of TVM's profiler and GFLOP/s."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a kernel, or several calls of the same kernel on the same shapes.

    Attributes
    ----------
    name
        Name of the kernel.
    duration_us
        Time of all `count` calls in one run, in microseconds.
    flops
        Floating-point operations of one call, or None if unknown.
    shapes
        Dtypes and shapes of the arguments, such as `float32[1, 4], float32[4]`.
    count
        Number of calls in one run.
    """

    name: str
    duration_us: float
    flops: float | None
    shapes: str
    count: int = 1

    @property
    def gflops(self) -> float | None:
        """Billions of floating-point operations per second, or None if unknown."""
        if self.flops is None or not self.duration_us:
            return None
        return self.flops * self.count / self.duration_us / 1e3


@dataclass(frozen=True, slots=True)
class Report:
    """The calls of a run and their times.

    Attributes
    ----------
    rows
        One for each call, in the order of execution.
    total_us
        Time of a whole run in microseconds, including the time to read the clock.
    """

    rows: tuple[Row, ...]
    total_us: float

    def aggregated(self) -> tuple[Row, ...]:
        """Return the rows, with calls of the same kernel on the same shapes merged into one."""
        merged: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            key = (row.name, row.shapes)
            old = merged.get(key)
            merged[key] = row if old is None else _add(old, row)
        return tuple(merged.values())

    def table(self, *, sort: bool = True, aggregate: bool = True, col_sums: bool = True) -> str:
        """Return a table for people; names of more than 48 characters are shortened in the middle.

        Parameters
        ----------
        sort
            Whether to sort by time, longest first, instead of in the order of execution.
        aggregate
            Whether to merge calls of the same kernel on the same shapes into one row.
        col_sums
            Whether to add rows with the sum of the calls and the total of the run.
        """
        rows = self._rows(sort, aggregate)
        lines = [_HEADS, *(self._cells(row) for row in rows)]
        if col_sums:
            spent = sum(row.duration_us for row in rows)
            lines.append(("----------", "", "", "", "", "", ""))
            lines.append(
                ("Sum", _number(spent), self._percent(spent), "", "", str(sum(r.count for r in rows)), "")
            )
            lines.append(("Total", _number(self.total_us), "", "", "cpu", "1", ""))
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
        return "\n".join(_line(line, widths) for line in lines)

    def json(self) -> str:
        """Return the report in the JSON form of TVM's profiler."""
        return json.dumps(
            {
                "calls": [
                    {
                        "Name": row.name,
                        "Duration (us)": {"microseconds": row.duration_us},
                        "Percent": {"percent": self._share(row.duration_us)},
                        "GFLOP/s": None if row.gflops is None else {"ratio": row.gflops},
                        "Device": "cpu",
                        "Count": {"count": row.count},
                        "Argument Shapes": row.shapes,
                    }
                    for row in self.rows
                ],
                "device_metrics": {"cpu": {"Duration (us)": {"microseconds": self.total_us}}},
                "configuration": {"Executor": "Graph"},
            }
        )

    def csv(self) -> str:
        """Return the rows as comma-separated values with a header line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_HEADS)
        for row in self.rows:
            gflops = "" if row.gflops is None else f"{row.gflops:.6g}"
            share = f"{self._share(row.duration_us):.6g}"
            writer.writerow((row.name, f"{row.duration_us:.6g}", share, gflops, "cpu", row.count, row.shapes))
        return out.getvalue()

    def __str__(self) -> str:
        return self.table()

    def _rows(self, sort: bool, aggregate: bool) -> Sequence[Row]:
        rows = self.aggregated() if aggregate else self.rows
        return sorted(rows, key=lambda row: -row.duration_us) if sort else rows

    def _cells(self, row: Row) -> tuple[str, ...]:
        gflops = "" if row.gflops is None else f"{row.gflops:.1f}"
        duration = _number(row.duration_us)
        name = _elided(row.name)
        return (name, duration, self._percent(row.duration_us), gflops, "cpu", str(row.count), row.shapes)

    def _share(self, duration_us: float) -> float:
        return 100 * duration_us / self.total_us if self.total_us else 0.0

    def _percent(self, duration_us: float) -> str:
        return f"{self._share(duration_us):.2f}"


_HEADS: Final = ("Name", "Duration (us)", "Percent", "GFLOP/s", "Device", "Count", "Argument Shapes")
# A fused kernel's name lists its operators, up to some 180 characters, which would not fit a terminal.
_NAME_CHARACTERS: Final = 48


def _add(a: Row, b: Row) -> Row:
    return replace(a, duration_us=a.duration_us + b.duration_us, count=a.count + b.count)


def _elided(name: str) -> str:
    """Return `name`, without its middle if it is longer than `_NAME_CHARACTERS`."""
    if len(name) <= _NAME_CHARACTERS:
        return name
    kept = _NAME_CHARACTERS - len("...")
    tail = kept // 2
    return f"{name[: kept - tail]}...{name[-tail:]}"


def _number(value: float) -> str:
    return f"{value:,.2f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # Names and shapes are aligned left, numbers right.
    last = len(cells) - 1
    return "  ".join(
        cell.ljust(width) if column in {0, last} else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
