"""The report of a profile: a table for people, JSON and CSV with the columns of TVM's profiler and more.

The table says which nodes of the model a kernel computes, and fits the terminal. JSON has everything.
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from agent.bundle.layer import Layer, clean, shorten
from agent.terminal import cell_of


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
    layers
        What each call computes of the model, empty if the bundle does not say.
    """

    name: str
    duration_us: float
    flops: float | None
    shapes: str
    count: int = 1
    layers: tuple[Layer, ...] = ()

    @property
    def gflops(self) -> float | None:
        """Billions of floating-point operations per second, or None if unknown."""
        if self.flops is None or not self.duration_us:
            return None
        return self.flops * self.count / self.duration_us / 1e3

    @property
    def kind(self) -> str:
        """The kernel's operators without their numbers, such as `conv2d add relu`."""
        return " ".join(re.sub(r"\d+(?=_|$)|tir_", "", self.name.removeprefix("fused_")).split("_"))


@dataclass(frozen=True, slots=True)
class Stage:
    """Work around the kernels, such as decoding a picture, and its time in microseconds."""

    name: str
    duration_us: float


@dataclass(frozen=True, slots=True)
class Report:
    """The calls of a run and their times.

    Attributes
    ----------
    rows
        One for each call, in the order of execution.
    total_us
        Time of a whole run in microseconds, including the time to read the clock.
    stages
        What comes before and after the kernels: decoding, preprocessing, postprocessing.
    """

    rows: tuple[Row, ...]
    total_us: float
    stages: tuple[Stage, ...] = field(default=())

    def aggregated(self) -> tuple[Row, ...]:
        """Return the rows, with calls of the same kernel on the same shapes merged into one."""
        merged: dict[tuple[str, str], Row] = {}
        for row in self.rows:
            key = (row.name, row.shapes)
            old = merged.get(key)
            merged[key] = row if old is None else _add(old, row)
        return tuple(merged.values())

    def table(
        self,
        *,
        sort: bool = True,
        aggregate: bool = True,
        col_sums: bool = True,
        width: int | None = None,
    ) -> str:
        """Return a table for people; what is too long for its column is shortened in the middle.

        Parameters
        ----------
        sort
            Whether to sort by time, longest first, instead of in the order of execution.
        aggregate
            Whether to merge calls of the same kernel on the same shapes into one row.
        col_sums
            Whether to add rows with the sum of the calls, the stages and the total of the run.
        width
            Characters in a line; None means the terminal's, or 100 where there is none.
        """
        rows = list(self.aggregated() if aggregate else self.rows)
        if sort:
            rows.sort(key=lambda row: -row.duration_us)
        lines = [_HEADS, *(self._cells(row) for row in rows)]
        if col_sums:
            spent = sum(row.duration_us for row in rows)
            count = str(sum(row.count for row in rows))
            lines.append(("", "", "", "", "", "", "", ""))
            lines.append((_number(spent), self._percent(spent), count, "sum of the kernels", "", "", "", ""))
            lines.append((_number(self.total_us), "", "1", "a whole run", "", "", "", ""))
            lines.extend((_number(s.duration_us), "", "1", s.name, "", "", "", "") for s in self.stages)
        room = shutil.get_terminal_size((_COLUMNS, 24)).columns if width is None else width
        return _fitted(lines, min(max(room, _FEWEST_COLUMNS), _MOST_COLUMNS))

    def to_dict(self) -> dict[str, Any]:
        """Return the report in the JSON form of TVM's profiler, with what it does not have."""
        return {
            "calls": [
                {
                    "Name": row.name,
                    "Duration (us)": {"microseconds": row.duration_us},
                    "Percent": {"percent": self._share(row.duration_us)},
                    "GFLOP/s": None if row.gflops is None else {"ratio": row.gflops},
                    "Device": "cpu",
                    "Count": {"count": row.count},
                    "Argument Shapes": row.shapes,
                    "FLOP": row.flops,
                    "Layers": [layer.to_attrs() for layer in row.layers],
                }
                for row in self.rows
            ],
            "stages": [
                {"Name": s.name, "Duration (us)": {"microseconds": s.duration_us}} for s in self.stages
            ],
            "device_metrics": {"cpu": {"Duration (us)": {"microseconds": self.total_us}}},
            "configuration": {"Executor": "Graph"},
        }

    def json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Report:
        """Read what `to_dict` wrote; the document may come from anywhere.

        Raises
        ------
        ValueError
            If it is not such a report.
        """
        try:
            rows = tuple(
                Row(
                    clean(str(call["Name"]), _MAX_NAME_CHARS),
                    float(call["Duration (us)"]["microseconds"]),
                    None if call.get("FLOP") is None else float(call["FLOP"]),
                    str(call["Argument Shapes"])[:_MAX_SHAPES_CHARS],
                    int(call["Count"]["count"]),
                    tuple(map(_layer, call.get("Layers", ()))),
                )
                for call in document["calls"]
            )
            stages = tuple(
                Stage(
                    clean(str(each["Name"]), _MAX_NAME_CHARS, " "),
                    float(each["Duration (us)"]["microseconds"]),
                )
                for each in document.get("stages", ())
            )
            total = float(document["device_metrics"]["cpu"]["Duration (us)"]["microseconds"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"expected a report of `edgebundle profile --json` ({error!r:.80})") from error
        return cls(rows, total, stages)

    def csv(self) -> str:
        """Return the rows as comma-separated values with a header line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_CSV_HEADS)
        for row in self.rows:
            gflops = "" if row.gflops is None else f"{row.gflops:.6g}"
            share = f"{self._share(row.duration_us):.6g}"
            nodes = "; ".join(node for layer in row.layers for node in layer.nodes)
            cells = (row.name, f"{row.duration_us:.6g}", share, gflops, "cpu", row.count, row.shapes, nodes)
            writer.writerow([cell_of(cell) for cell in cells])
        return out.getvalue()

    def __str__(self) -> str:
        return self.table()

    def _cells(self, row: Row) -> tuple[str, ...]:
        gflops = f"{row.gflops:.1f}" if row.gflops else ""
        windows = dict.fromkeys(layer.window for layer in row.layers if layer.window)
        return (
            _number(row.duration_us),
            self._percent(row.duration_us),
            str(row.count),
            row.kind,
            _nodes(row.layers),
            _shapes(row),
            next(iter(windows), "") if len(windows) == 1 else "",
            gflops,
        )

    def _share(self, duration_us: float) -> float:
        return 100 * duration_us / self.total_us if self.total_us else 0.0

    def _percent(self, duration_us: float) -> str:
        return f"{self._share(duration_us):.1f}"


_HEADS: Final = ("Time (us)", "%", "Count", "Kernel", "ONNX nodes", "Shapes", "Window", "GFLOP/s")
_CSV_HEADS: Final = (
    "Name", "Duration (us)", "Percent", "GFLOP/s", "Device", "Count", "Argument Shapes", "ONNX Nodes",
)  # fmt: skip
_WHOLE_US: Final = 100_000  # from here on, times have no decimals
_COLUMNS: Final = 100
_FEWEST_COLUMNS: Final = 80
_MOST_COLUMNS: Final = 200
_MAX_NAME_CHARS: Final = 256
_MAX_SHAPES_CHARS: Final = 4096
_LISTED_CHARS: Final = 24  # of the nodes of several calls; of more, the first and the last are named
_MARGIN: Final = 2  # between columns
_KERNEL, _NODES, _SHAPES, _WINDOW = 3, 4, 5, 6
# Columns in the order in which they are made narrower, each down to this width, until a line fits.
_GIVE_WAY: Final = (
    (_SHAPES, 25), (_KERNEL, 20), (_NODES, 26), (_SHAPES, 12), (_KERNEL, 12), (_NODES, 14), (_WINDOW, 6),
    (_NODES, 10), (_SHAPES, 10),
)  # fmt: skip
_MOST: Final = {_KERNEL: 26, _SHAPES: 34, _WINDOW: 16}
_LEFT: Final = frozenset({_KERNEL, _NODES, _SHAPES, _WINDOW})
# The operator that a kernel is about if it computes several nodes; otherwise the first one.
_HEAVY: Final = frozenset(
    {
        "Conv", "ConvInteger", "ConvTranspose", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger",
        "QLinearConv", "QLinearMatMul", "RNN",
    }
)  # fmt: skip


def _add(a: Row, b: Row) -> Row:
    return replace(
        a, duration_us=a.duration_us + b.duration_us, count=a.count + b.count, layers=a.layers + b.layers
    )


def _layer(attrs: Mapping[str, Any]) -> Layer:
    return Layer.from_attrs({str(key): str(value) for key, value in attrs.items()})


def _nodes(layers: Sequence[Layer]) -> str:
    """Return the nodes of a call, or the main node of each of several calls."""
    named = [layer for layer in layers if layer.nodes]
    if len(named) == 1:
        main, others = _main(named[0]), len(named[0].nodes) - 1
        return f"{main} +{others}" if others else main
    mains = [_main(layer) for layer in named]
    listed = ", ".join(mains)
    return listed if len(listed) <= _LISTED_CHARS else f"{mains[0]} .. {mains[-1]}"


def _main(layer: Layer) -> str:
    pairs = zip(layer.operators, layer.names, strict=True)
    return next((name for operator, name in pairs if operator in _HEAVY), layer.names[0])


def _shapes(row: Row) -> str:
    """Return the shapes that the nodes read and write, as in the model, or those of the arguments."""
    layer = row.layers[0] if row.layers else Layer()
    reads, writes = layer.reads, layer.writes
    if not writes:
        plain = [part.replace(", ", "x") or "scalar" for part in re.findall(r"\[([^\]]*)\]", row.shapes)]
        reads, writes = tuple(plain[:1] if len(plain) > 1 else ()), tuple(plain[-1:])
    source, target = _first(reads), _first(writes)
    return target if source in ("", target) else f"{source} > {target}"


def _first(shapes: Sequence[str]) -> str:
    more = len(set(shapes)) - 1
    return "" if not shapes else f"{shapes[0]} +{more}" if more > 0 else shapes[0]


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < _WHOLE_US else f"{value:,.0f}"


def _fitted(lines: Sequence[Sequence[str]], room: int) -> str:
    """Return the lines in columns that together take at most `room` characters."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    for column, most in _MOST.items():
        widths[column] = min(widths[column], most)
    for column, least in _GIVE_WAY:
        excess = sum(widths) + _MARGIN * (len(widths) - 1) - room
        if excess > 0:
            widths[column] = max(widths[column] - excess, min(widths[column], least))
    return "\n".join(_line(line, widths) for line in lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    if not any(cells[_NODES:]):  # nothing follows the name of a sum
        widths = [*widths[:_KERNEL], len(cells[_KERNEL]), *widths[_NODES:]]
    return (
        (" " * _MARGIN)
        .join(
            _cut(cell, column, width).ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        .rstrip()
    )


def _cut(cell: str, column: int, width: int) -> str:
    if column == _SHAPES and len(cell) > width:
        cell = cell.rpartition(" > ")[2]
    if column == _KERNEL and len(cell) > width:
        return cell[: width - len("..")] + ".."
    return shorten(cell, width)
