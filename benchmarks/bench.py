"""`make bench`: our engine against other engines, with the same models, inputs and threads.

Engines take turns, so that a drift in the machine's speed affects all of them alike; medians over all turns
are compared. The results are printed, and written as JSON, Markdown and pictures.

    python -m benchmarks.bench --models resnet18 bert --threads 1 --rounds 5
    python -m benchmarks.bench --markdown          # the tables of the last run, for docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks import costs, engines, footprint, layers, pictures, tables
from benchmarks.engines import ENGINES, OURS, UNTUNED, bundle_of
from benchmarks.prepare import HEADLINE, INT8, MODELS, prepare
from benchmarks.rounds import Measured, measure
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo.models import DEFAULT, NAMES

MARKDOWN: Final = "bench.md"
COSTS_MODEL: Final = "resnet50"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit status."""
    args = _parser().parse_args(arguments)
    if args.zoo is None:
        args.zoo = [] if args.models else list(DEFAULT)
    args.models = args.models or list(MODELS)
    if args.markdown:
        return tables.print_file(args.output / MARKDOWN)
    console = Console(width=None if sys.stdout.isatty() else 180)
    args.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    results: list[Measured] = []
    paths: dict[str, Path] = {}
    for name in args.models:
        model = prepare(name, args.output / "models", args.tuning_records, keep=args.keep_bundles)
        paths[name] = model.path
        compiled = "kept" if model.compile_s is None else f"compiled in {model.compile_s:.1f} s"
        console.print(f"{name}: {compiled}, {_records(args)}", highlight=False)
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
    for threads in args.threads:
        times = {r.model: r.median_ms for r in results if r.threads == threads}
        document["headline"] |= {
            f"int8 over float32, {name}, threads: {threads}": ratio
            for name, ratio in tables.over_float32(times, OURS).items()
        }
    console.print()
    parts = [("Milliseconds per inference", tables.rows(results)), ("Spread", tables.spreads(results))]
    parts.append(("Largest relative difference to the reference", tables.parities(results)))
    if not args.times_only:
        under = _layers(paths, max(args.threads), args.output)
        document["layers"] = {name: asdict(each) for name, each in under.items()}
        document["headline"] |= {
            f"share of the peak, {name}, threads: {each.threads}": each.share_of_peak
            for name, each in under.items()
        }
        figures = _costs(paths)
        document["costs"] = {what: value for what, value, _ in figures}
        parts.append(("Costs beside kernels", tables.costs(figures)))
    for title, (heads, body) in parts:
        tables.show(console, title, heads, body)
    if args.zoo:
        document["zoo"] = _zoo(console, args)
    for key, value in document["headline"].items():
        console.print(f"{key}: {value:.3f}", highlight=False)
    document["seconds"] = time.perf_counter() - began
    (args.output / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.output / MARKDOWN).write_text(_markdown(document, results))
    _pictures(document, args.output)
    names = ("latency.png", "int8.png", "roofline.png")
    pictures.publish([args.output / name for name in names], args.pictures)
    console.print(f"{document['seconds']:.0f} s; in {args.output}: {', '.join(_written(args.output))}")
    return 0


def _layers(paths: Mapping[str, Path], threads: int, output: Path) -> dict[str, layers.Layers]:
    """Measure the layers of the headline models, and draw their rooflines."""
    names = [name for name in paths if name in HEADLINE]
    if not names:
        return {}
    found = layers.measured([bundle_of(paths[name], OURS) for name in names], threads)
    under = dict(zip(names, found, strict=True))
    title = f"Layers under the roofline: {machine()['processor']}, float32"
    pictures.roofline(under, output / "roofline.png", title)
    return under


def _zoo(console: Console, args: argparse.Namespace) -> dict[str, Any] | None:
    """Compare models of the zoo with ONNX Runtime; return the figures, None if no model could be compared."""
    console.print()
    found = zoo.compared(args.zoo, args.threads, args.output, console, keep=args.keep_bundles)
    return zoo.report(console, found, args.output, args.pictures) if found else None


def _costs(paths: Mapping[str, Path]) -> list[tuple[str, float, float]]:
    """Return costs besides kernels: name, value, and the limit (0 if there is none)."""
    figures: list[tuple[str, float, float]] = []
    if COSTS_MODEL in paths:
        cost = costs.measured(paths[COSTS_MODEL])
        figures = [
            ("compile of ResNet-50 for a cold target, s", cost.compile_s, costs.COMPILE_LIMIT_S),
            ("its memory, GiB", cost.compile_bytes / 2**30, costs.COMPILE_LIMIT_BYTES / 2**30),
            ("executor, us per node", cost.node_us, costs.NODE_LIMIT_US),
            ("ResNet-50 from verify to first answer, s", cost.answer_s, costs.ANSWER_LIMIT_S),
        ]
    agent = footprint.measure()
    return [
        *figures,
        ("agent and its dependencies, installed, MB", agent.installed_bytes / 1e6, 0.0),
        ("agent, from start to ready, s", agent.ready_s, 0.0),
        ("agent without a model, resident MiB", agent.idle_bytes / 2**20, 0.0),
    ]


def _pictures(document: dict[str, Any], folder: Path) -> None:
    """Draw `latency.png` of the networks in float32, and `int8.png` of those in int8."""
    times: dict[str, dict[int, dict[str, float]]] = {}
    for result in document["results"]:
        times.setdefault(result["model"], {})[result["threads"]] = result["median_ms"]
    where = document["machine"]
    for name, precision, models in (
        ("latency.png", "float32", times.keys() - set(INT8)),
        ("int8.png", "int8", times.keys() & set(INT8)),
    ):
        title = f"Milliseconds per inference, {precision}, batch 1: {where['processor']}, {where['vectors']}"
        (folder / name).unlink(missing_ok=True)
        if models:
            pictures.latency(
                {model: times[model] for model in times if model in models}, folder / name, title
            )


def _written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def machine() -> dict[str, Any]:
    """Return a description of this machine, without which figures mean nothing."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    vectors = next((name for name in ("avx512f", "avx2", "sse2") if name in flags), "")
    vectors = {"avx512f": "AVX-512", "avx2": "AVX2"}.get(vectors, vectors)
    vectors += " and AMX" if "amx_tile" in flags else ""
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
    parser.add_argument("--models", nargs="+", choices=MODELS, help="which models (default: all)")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, len(os.sched_getaffinity(0)))])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=9, help="turns of each engine (default: 9)")
    parser.add_argument("--turn", type=float, default=0.15, help="seconds of a turn (default: 0.15)")
    parser.add_argument("--tuning-records", metavar="DIR", help="compile with these records")
    parser.add_argument("--keep-bundles", action="store_true", help="measure the bundles of an earlier run")
    parser.add_argument("--times-only", action="store_true", help="skip layers and costs")
    parser.add_argument(
        "--zoo",
        nargs="*",
        choices=NAMES,
        metavar="NAME",
        help="models without tuning records of their own, beside ONNX Runtime (default: twelve, or none if "
        "--models names others)",
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench"), help="folder for the results")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also copy the pictures to this folder")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the last run and exit")
    return parser


def _records(args: argparse.Namespace) -> str:
    if args.tuning_records:
        return f"with the records of {args.tuning_records}"
    return "without tuning records"


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
        f"Milliseconds per inference, float32 or int8, batch 1, medians; "
        f"{where['processor']} ({where['vectors']}), "
        f"{where['cores']} cores; {versions}.",
        "",
        tables.markdown(*tables.rows(results)),
        "",
    ]
    if any(result.noise.disturbed for result in results):
        lines += [f"{tables.BUSY} the machine was busy with other work.".replace("*", "\\*", 1), ""]
    lines += [f"- {key}: {value:.2f}" for key, value in document["headline"].items()]
    lines += [f"- {key}: {value:.3g}" for key, value in document.get("costs", {}).items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
