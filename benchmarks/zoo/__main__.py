"""The zoo: architectures without tuning records of their own, our time over ONNX Runtime's.

Models are exported from torchvision and transformers with seeded random weights, compiled for this machine
with default settings, and timed in one process with ONNX Runtime, in blocks that take turns.

    python -m benchmarks.zoo                            # twelve of them; `make bench` has them too
    python -m benchmarks.zoo densenet121 gru --threads 2
    python -m benchmarks.zoo all --keep-bundles
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import pictures, tables
from benchmarks.zoo.comparison import BLOCKS, Compared, compare, geometric_mean, rows
from benchmarks.zoo.models import DEFAULT, NAMES

ALL: Final = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare models; return the exit status: 1 if none could be compared."""
    args = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    names = NAMES if ALL in args.names else args.names or DEFAULT
    if unknown := sorted(set(names) - set(NAMES)):
        _parser().error(f"expected names among {', '.join((ALL, *NAMES))}, got {', '.join(unknown)}")
    found = compared(names, args.threads, args.output, console, blocks=args.blocks, keep=args.keep_bundles)
    if not found:
        print("error: no model of the zoo could be compared", file=sys.stderr)
        return 1
    report(console, found, args.output, args.pictures)
    return 0


def compared(
    names: Sequence[str],
    threads: Sequence[int],
    output: Path,
    console: Console,
    *,
    blocks: int = BLOCKS,
    keep: bool,
) -> list[Compared]:
    """Compare models, and print a line for each."""

    def progress(line: str) -> None:
        console.print(line, highlight=False, markup=False)

    folder = output / "zoo"
    return list(compare(names, threads, folder, blocks=blocks, keep=keep, progress=progress))


def report(
    console: Console, results: Sequence[Compared], output: Path, published: Path | None
) -> dict[str, Any]:
    """Print the table, write `zoo.json` and `zoo.png` to `output`; return the figures."""
    tables.show(console, "The zoo: milliseconds per inference", *rows(results))
    counts = sorted({count for result in results for count in result.times_ms})
    document = {
        "load": os.getloadavg()[0],
        "geometric_mean": {count: geometric_mean(results, count) for count in counts},
        "models": [
            {**asdict(result), "ratios": {count: result.ratio(count) for count in counts}}
            for result in results
        ],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "zoo.json").write_text(json.dumps(document, indent=1) + "\n")
    ratios = {result.model: {count: result.ratio(count) for count in counts} for result in results}
    try:
        pictures.ratios(ratios, output / "zoo.png", "The zoo: our time over ONNX Runtime's")
    except ModuleNotFoundError as error:
        print(f"no picture: {error.name} is not installed; `make bench` has it", file=sys.stderr)
    pictures.publish([output / "zoo.png"], published)
    return document


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"'{ALL}', or any of {', '.join(NAMES)} (default: twelve)"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, len(os.sched_getaffinity(0)))])
    parser.add_argument("--blocks", type=int, default=BLOCKS, help=f"turns (default: {BLOCKS})")
    parser.add_argument("--keep-bundles", action="store_true", help="measure the bundles of an earlier run")
    parser.add_argument("--output", type=Path, default=Path("build/bench"), help="folder for the results")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also copy the picture to this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
