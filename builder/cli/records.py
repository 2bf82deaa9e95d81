"""The verb `records`: merge, reduce, show and export tuning records."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from agent.terminal import cell_of, note, say, say_json, say_text
from builder.cli import SubParsers
from builder.cli.arguments import json_flag
from builder.cli.flags import argument, flag, takes

if TYPE_CHECKING:
    from builder.records.folder import Records
    from builder.target.device_target import DeviceTarget

EXAMPLES: Final = """examples:
  edgebundle records show records/
  edgebundle records merge monday/ tuesday/ -o records/
  edgebundle records best records/ -o best/           # only the schedules that compile uses
  edgebundle records export records/ --format csv > points.csv
"""


@dataclass(frozen=True, slots=True)
class _Merge:
    folders: list[str] = argument(nargs="+", metavar="FOLDER", help="records, all for the same target")
    output: str = flag("-o", required=True, metavar="FOLDER", help="a new folder, or one to add to")


@dataclass(frozen=True, slots=True)
class _Best:
    folder: str = argument(metavar="FOLDER", help="records")
    output: str = flag("-o", required=True, metavar="FOLDER", help="a new folder")


@dataclass(frozen=True, slots=True)
class _Show:
    folder: str = argument(metavar="FOLDER", help="records")
    json: bool = json_flag()


@dataclass(frozen=True, slots=True)
class _Export:
    folder: str = argument(metavar="FOLDER", help="records")
    format: str = flag(choices=["json", "csv"], default="json", help="output format (default: %(default)s)")


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "records",
        help="merge, reduce, show and export tuning records",
        description="Work with tuning records, the folders that `edgebundle tune -o FOLDER` writes.",
        epilog=EXAMPLES,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="records_verb", required=True)

    merge = verbs.add_parser(
        "merge",
        help="merge the records of several folders",
        description="Merge the records of several folders, all for the same target.",
        epilog="example:\n  edgebundle records merge monday/ tuesday/ -o records/",
    )
    takes(merge, _Merge, _merge)

    best = verbs.add_parser(
        "best",
        help="keep only the schedules that compile uses",
        description="Copy only the schedules that compile uses to a new folder.",
        epilog="example:\n  edgebundle records best records/ -o best/",
    )
    takes(best, _Best, _best)

    show = verbs.add_parser(
        "show",
        help="print the operators, their times, and which schedules are used",
        description="Print a table of the operators: measured points, untuned and best time, and whether\n"
        "compile uses the best schedule.",
        epilog="example:\n  edgebundle records show records/",
    )
    takes(show, _Show, _show)

    export = verbs.add_parser(
        "export",
        help="print every measured point as JSON or CSV",
        description="Print every measured point as JSON or CSV, for other programs.",
        epilog="example:\n  edgebundle records export records/ --format csv > points.csv",
    )
    takes(export, _Export, _export)


def _merge(args: _Merge) -> int:
    from builder.records.best_records import merge

    target = _target(_read(args.folders[0]))
    for folder in args.folders[1:]:
        _read(folder)
    with merge(args.output, args.folders, target) as merged:
        say(f"{args.output}: {len(merged.all)} points of {len(merged.keys)} operators")
    return 0


def _best(args: _Best) -> int:
    from builder.records.best_records import pick_best

    records = _read(args.folder)
    with pick_best(records, args.output, _target(records)) as picked:
        say(f"{args.output}: {len(picked.all)} schedules out of {len(records.all)} measured points")
    return 0


def _show(args: _Show) -> int:
    records = _read(args.folder)
    rows = _operators(records)
    if args.json:
        from agent.bundle.canonical_json import to_json

        document = to_json(records.meta)
        del document["verdicts"]
        say_json({**document, "operators": rows})
        return 0
    meta = records.meta
    say(f"{args.folder}: for {meta.device}")
    say(f"  TVM {meta.tvm}, design spaces {meta.spaces}, {len(records.all)} points")
    for name, board in sorted(meta.boards.items()):
        say(f"  board {name}: {board.describe()}")
    heads = ("points", "untuned us", "fastest us", "use", "operator")
    cells = [
        (
            str(r["points"]),
            _us(r["untuned_us"]),
            _us(r["best_us"]),
            "yes" if r["use"] else "no",
            str(r["name"]),
        )
        for r in rows
    ]
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    for line in [heads, *cells]:
        say("  ".join(c.rjust(w) if i < 4 else c for i, (c, w) in enumerate(zip(line, widths, strict=True))))
    return 0


def _export(args: _Export) -> int:
    records = _read(args.folder)
    operators = records.meta.operators
    points = []
    for record in records.all:
        operator = operators.get(record.key)
        points.append(
            {
                "workload": record.key,
                "operator": operator.name if operator else "",
                "point": operator.describe(record.decisions) if operator else "",
                "seconds": record.seconds,
            }
        )
    if args.format == "json":
        say_json(points)
        return 0
    table = io.StringIO()
    writer = csv.DictWriter(table, ["workload", "operator", "point", "seconds"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: cell_of(cell) for name, cell in point.items()} for point in points)
    say_text(table.getvalue())
    return 0


def _read(folder: str) -> Records:
    """Read a folder, and print which of its records are skipped."""
    from builder.records.folder import Records

    records = Records.read(folder)
    for line in records.notes():
        note(line)
    return records


def _operators(records: Records) -> list[dict[str, Any]]:
    from builder.records.best_records import chosen

    rows = []
    for key in records.keys:
        known, operator = records.measured(key), records.meta.operators.get(key)
        best = records.best(key)
        default = known.get(operator.default) if operator else None
        rows.append(
            {
                "workload": key,
                "name": operator.name if operator else key,
                "points": len(known),
                "untuned_us": None if default is None else default * 1e6,
                "best_us": (best[0].seconds or 0.0) * 1e6 if best else None,
                "use": chosen(records, key) is not None,
            }
        )
    return rows


def _target(records: Records) -> DeviceTarget:
    from builder.target.device_target import resolve

    config = {"num-cores": 1, **json.loads(records.meta.target)}
    return resolve(config)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
