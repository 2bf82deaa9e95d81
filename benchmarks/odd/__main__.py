"""`make bench-odd`: operators with random extents, over their smooth neighbours.

Each operator is compiled for this machine with the heuristic's decisions, and timed on one core in turn with
the operator whose extents are rounded up to friendly multiples. The figure is the time per useful operation,
divided by the neighbour's: 1 says that odd extents cost nothing, 2 that half of the time is lost.

    python -m benchmarks.odd --count 40 --seed 7
    python -m benchmarks.odd --kinds matmul attention --json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console
from rich.progress import track

from benchmarks import pictures, tables
from benchmarks.odd.operators import KINDS, drawn

if TYPE_CHECKING:
    from benchmarks.odd.timing import Timed

COUNT: Final = 400
SEED: Final = 20261122
BLOCKS: Final = 7
MOST_NAMED: Final = 10
MEDIAN_GOAL, WORST_GOAL = 1.1, 1.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    args = _parser().parse_args(arguments)
    os.environ["TVM_NUM_THREADS"] = "1"  # read when TVM's library starts its threads
    from benchmarks.denormals import flushed
    from benchmarks.odd.timing import compare
    from builder.target.device_target import resolve

    target = resolve("host")
    console = Console(width=None if sys.stdout.isatty() else 160, stderr=args.json)
    began = time.perf_counter()
    operators = drawn(args.kinds, args.count, args.seed)
    progress = track(operators, "comparing", console=console, disable=not console.is_terminal)
    with flushed(target):
        results = [compare(operator, target, args.blocks) for operator in progress]
    document = _document(results, args, time.perf_counter() - began)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "odd.json").write_text(json.dumps(document, indent=1) + "\n")
    if args.json:
        print(json.dumps(document))
    else:
        tables.show(console, "Time per useful operation over the smooth neighbour", *by_kind(results))
        tables.show(console, "The worst", *worst(results))
        for figure, goal in (("median", MEDIAN_GOAL), ("worst", WORST_GOAL)):
            console.print(f"{figure}: {document[figure]:.2f}, goal {goal}", highlight=False)
    try:
        _picture(results, args)
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed; `make bench-odd` has it", file=sys.stderr)
    return 0


def by_kind(results: Sequence[Timed]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: a row for each kind, and one for all of them."""
    rows = []
    for name in [*dict.fromkeys(r.operator.kind for r in results), "all"]:
        factors = [r.factor for r in results if name in (r.operator.kind, "all")]
        above = sum(factor > WORST_GOAL for factor in factors)
        median, most = statistics.median(factors), max(factors)
        rows.append([name, str(len(factors)), f"{median:.2f}", f"{most:.2f}", str(above)])
    return ["kind", "operators", "median", "worst", f"above {WORST_GOAL}"], rows


def worst(results: Sequence[Timed], count: int = MOST_NAMED) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: the `count` operators that lose most by their extents."""
    rows = [
        [
            str(r.operator),
            f"{r.factor:.2f}",
            f"{r.odd_us:.0f}",
            f"{r.smooth_us:.0f}",
            f"{r.gops:.1f}",
            " ".join(dict.fromkeys(r.schedules.values())),
        ]
        for r in sorted(results, key=lambda r: -r.factor)[:count]
    ]
    return ["operator", "factor", "us", "us, smooth", "G useful/s", "design spaces"], rows


def _document(results: Sequence[Timed], args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    from benchmarks.bench import machine

    factors = [r.factor for r in results]
    return {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "seed": args.seed,
        "seconds": seconds,
        "median": statistics.median(factors),
        "worst": max(factors),
        "operators": [
            {
                "kind": r.operator.kind,
                "extents": dict(r.operator.extents),
                "smooth": dict(r.smooth.extents),
                "us": r.odd_us,
                "smooth_us": r.smooth_us,
                "factor": r.factor,
                "schedules": dict(r.schedules),
            }
            for r in results
        ],
    }


def _picture(results: Sequence[Timed], args: argparse.Namespace) -> None:
    factors: dict[str, list[float]] = {}
    for r in results:
        factors.setdefault(r.operator.kind, []).append(r.factor)
    path = args.output / "odd.png"
    pictures.factors(
        factors, path, "Odd extents: time per useful operation over the smooth neighbour", WORST_GOAL
    )
    pictures.publish([path], args.pictures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.odd", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=_positive, default=COUNT, help=f"operators (default: {COUNT})")
    parser.add_argument("--seed", type=int, default=SEED, help="of the random extents")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND",
                        help=f"any of {', '.join(KINDS)} (default: all)")  # fmt: skip
    parser.add_argument("--blocks", type=_positive, default=BLOCKS, help=f"turns (default: {BLOCKS})")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of tables")
    parser.add_argument(
        "--output", type=Path, default=Path("build/bench-odd"), help="folder for odd.json and odd.png"
    )
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also copy the picture to this folder")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
