"""``make bench``: ours against the engines that people use, on the same models, inputs and threads.

Engines take turns, so that a machine whose speed drifts drifts for all of them; medians over all turns are
compared. What is printed is written as JSON, as Markdown and as pictures too.

    python -m benchmarks.bench --models resnet18 bert --threads 1 --rounds 5
    python -m benchmarks.bench --markdown          # the tables of the last run, for the README
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import engines, tables
from benchmarks.engines import ENGINES, OURS, UNTUNED
from benchmarks.prepare import MODELS, Prepared, prepare
from benchmarks.rounds import Measured, measure

MARKDOWN = "bench.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = _parser().parse_args(arguments)
    if args.markdown:
        return _print_markdown(args.output)
    console = Console(width=None if sys.stdout.isatty() else 180)
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results: list[Measured] = []
    for name in args.models:
        model = prepare(name, args.output / "models", args.tuning_records, keep=args.keep_bundles)
        compiled = "kept" if model.compile_s is None else f"compiled in {model.compile_s:.1f} s"
        console.print(f"{name}: {compiled}, {_records(model, args)}", highlight=False)
        for threads in args.threads:
            result = measure(
                name, model.path, threads, args.engines, model.reference, rounds=args.rounds, turn_s=args.turn
            )
            results.append(result)
            _report(console, result)
    document: dict[str, Any] = {
        "machine": machine(),
        "engines": engines.versions(),
        "results": [_as_json(result) for result in results],
        "headline": tables.headline(results),
    }
    console.print()
    parts = [("Milliseconds an inference", tables.rows(results)), ("Spread", tables.spreads(results))]
    parts.append(("Largest relative difference to the reference", tables.parities(results)))
    for title, (heads, body) in parts:
        tables.show(console, title, heads, body)
    for key, value in document["headline"].items():
        console.print(f"{key}: {value:.3f}")
    document["seconds"] = time.perf_counter() - began
    (args.output / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.output / MARKDOWN).write_text(_markdown(document, results))
    console.print(f"{document['seconds']:.0f} s; written: {args.output}/bench.json, {args.output}/{MARKDOWN}")
    return 0


def machine() -> dict[str, Any]:
    """What figures are worth nothing without."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    vectors = next((name for name in ("avx512f", "avx2", "sse2") if name in flags), "")
    return {
        "processor": names[0] if names else platform.machine(),
        "vectors": vectors,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, len(os.sched_getaffinity(0)))])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each engine (default: 9)")
    parser.add_argument("--turn", type=float, default=0.15, help="seconds of a turn (default: 0.15)")
    parser.add_argument(
        "--tuning-records", metavar="DIR", help="compile with these instead of the shipped ones"
    )
    parser.add_argument(
        "--keep-bundles", action="store_true", help="measure the bundles of an earlier run again"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench"), help="where results go")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the last run, and end")
    return parser


def _records(model: Prepared, args: argparse.Namespace) -> str:
    if args.tuning_records:
        return f"with the records of {args.tuning_records}"
    return f"shipped records decide {model.shipped_kernels} kernels"


def _report(console: Console, result: Measured) -> None:
    times = ", ".join(f"{engine} {tables.milliseconds(ms)}" for engine, ms in result.median_ms.items())
    ratio = result.ratio()
    over = f"; over {result.best_other}: {ratio.value:.2f}" if ratio is not None else ""
    console.print(f"  threads {result.threads}: {times} ms{over}", highlight=False)
    for engine, problem in result.problems.items():
        if engine != UNTUNED:
            console.print(f"    without {engine}: {problem}", highlight=False, markup=False)
    if result.noise.disturbed:
        console.print(f"    [yellow]the machine was busy: {result.noise}[/yellow]", highlight=False)


def _as_json(result: Measured) -> dict[str, Any]:
    ratios = {name: result.ratio(name) for name in (UNTUNED, OURS)}
    return {
        **asdict(result),
        "median_ms": result.median_ms,
        "best_other": result.best_other,
        "over_the_best": {name: asdict(ratio) for name, ratio in ratios.items() if ratio is not None},
    }


def _markdown(document: dict[str, Any], results: list[Measured]) -> str:
    where = document["machine"]
    versions = ", ".join(f"{engines.TITLES[name]} {version}" for name, version in document["engines"].items())
    lines = [
        f"Milliseconds an inference, float32, batch 1, medians; {where['processor']} ({where['vectors']}), "
        f"{where['cores']} cores; {versions}.",
        "",
        tables.markdown(*tables.rows(results)),
        "",
    ]
    if any(result.noise.disturbed for result in results):
        lines += [f"{tables.BUSY} the machine was busy with other work meanwhile.".replace("*", "\\*", 1), ""]
    lines += [f"- {key}: {value:.2f}" for key, value in document["headline"].items()]
    return "\n".join(lines) + "\n"


def _print_markdown(folder: Path) -> int:
    path = folder / MARKDOWN
    if not path.exists():
        print(f"error: {path}: no run has written it\nhint: run `make bench` first", file=sys.stderr)
        return 2
    print(path.read_text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
