"""``make bench``: ours against the engines that people use, on the same models, inputs and threads.

Engines take turns, so that a machine whose speed drifts drifts for all of them; medians over all turns are
compared. The models are generated from their architectures with seeded weights, which changes no kernel's
work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnx

from benchmarks import footprint, pictures
from benchmarks.architectures import generate
from benchmarks.engine_process import EngineProcess
from benchmarks.engines import ENGINES

SMALL = ("resnet18", "mobilenetv2")
MODELS = ("resnet18", "resnet50", "resnet50-v2", "mobilenetv2", "bert")
SEQUENCE = 128
# Threads of an engine that has just run spin for a few milliseconds; OpenMP's for up to 20 here.
PAUSE_S = 0.05


@dataclass
class Measured:
    """Times of one model with so many threads.

    Attributes
    ----------
    median_ms
        By engine.
    problems
        Why an engine is missing, by engine.
    """

    model: str
    threads: int
    median_ms: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    @property
    def best_other(self) -> str | None:
        """The fastest engine that is not ours."""
        others = {name: ms for name, ms in self.median_ms.items() if name != "edgebundle"}
        return min(others, key=others.__getitem__) if others else None

    @property
    def ratio(self) -> float | None:
        """Our time over the best other engine's."""
        best = self.best_other
        ours = self.median_ms.get("edgebundle")
        return ours / self.median_ms[best] if best is not None and ours is not None else None


def prepare(name: str, folder: Path, records: str | None) -> Path:
    """Generate a model, its inputs and our bundle; what is there already is kept."""
    from builder import compile
    from builder.importer import import_onnx
    from builder.sample_inputs import record

    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{name}.onnx"
    if not path.exists():
        onnx.save(generate(name), path)
    shapes = None
    if name == "bert":
        shapes = {key: [1, SEQUENCE] for key in ("input_ids", "attention_mask", "token_type_ids")}
    model = import_onnx(path, input_shapes=shapes)
    np.savez(place / "inputs.npz", **record(model.inputs, model.onnx))
    start = time.perf_counter()
    options = {"tuning_records": records} if records else {}
    compile(model, **options).save(path.with_suffix(".bundle"))
    print(f"  compiled {name} in {time.perf_counter() - start:.1f} s", flush=True)
    return path


def measure(name: str, model: Path, threads: int, engines: list[str], *, turns: int, runs: int) -> Measured:
    """Let the engines take turns."""
    result = Measured(name, threads)
    processes = {}
    for engine in engines:
        process = EngineProcess(engine, model, threads)
        if process.problem is None:
            processes[engine] = process
        else:
            result.problems[engine] = process.problem
            process.stop()
    times: dict[str, list[float]] = {engine: [] for engine in processes}
    try:
        for _ in range(turns):
            for engine, process in processes.items():
                time.sleep(PAUSE_S)
                times[engine] += process.times_s(runs)
    finally:
        for process in processes.values():
            process.stop()
    result.median_ms = {engine: statistics.median(spent) * 1e3 for engine, spent in times.items()}
    return result


def table(results: list[Measured], engines: list[str]) -> str:
    """Rows of medians in milliseconds, and the ratio to the best other engine."""
    lines = ["| model | threads | " + " | ".join(engines) + " | ours / best other |"]
    lines.append("|---|---|" + "---|" * (len(engines) + 1))
    for r in results:
        cells = [f"{r.median_ms[e]:.2f}" if e in r.median_ms else "-" for e in engines]
        ratio = f"{r.ratio:.2f} ({r.best_other})" if r.ratio is not None else "-"
        lines.append(f"| {r.model} | {r.threads} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, min(2, len(os.sched_getaffinity(0)))])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--turns", type=int, default=10, help="turns of each engine (default: 10)")
    parser.add_argument("--runs", type=int, default=5, help="runs in a turn (default: 5)")
    parser.add_argument("--small", action="store_true", help="two models, ONNX Runtime alone, few turns")
    parser.add_argument(
        "--tuning-records", metavar="DIR", help="compile with these instead of the shipped ones"
    )
    parser.add_argument("--output", type=Path, default=Path("build/bench"), help="where results go")
    args = parser.parse_args()
    if args.small:
        args.models, args.engines, args.turns = list(SMALL), ["edgebundle", "onnxruntime"], 6
    args.output.mkdir(parents=True, exist_ok=True)

    cost = footprint.measure()
    print(
        f"the agent: {cost.installed_bytes / 1e6:.0f} MB installed, ready in {cost.ready_s:.2f} s, "
        f"{cost.idle_bytes / 2**20:.1f} MiB resident without a model"
    )
    results = []
    for name in args.models:
        model = prepare(name, args.output / "models", args.tuning_records)
        for threads in args.threads:
            results.append(measure(name, model, threads, args.engines, turns=args.turns, runs=args.runs))
            print(table(results[-1:], args.engines).splitlines()[-1], flush=True)
            for engine, problem in results[-1].problems.items():
                print(f"    without {engine}: {problem}")
    print("\n" + table(results, args.engines))
    ratios = [r.ratio for r in results if r.ratio is not None]
    if ratios:
        print(f"geometric mean of ours over the best other engine: {statistics.geometric_mean(ratios):.3f}")
    document = {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.platform(),
        },
        "footprint": asdict(cost),
        "results": [{**asdict(r), "ratio": r.ratio, "best_other": r.best_other} for r in results],
    }
    (args.output / "bench.json").write_text(json.dumps(document, indent=1) + "\n")
    bars = {f"{r.model}, {r.threads} thread{'s' * (r.threads > 1)}": r.median_ms for r in results}
    (args.output / "latency.svg").write_text(pictures.latency(bars, args.engines))
    print(f"written: {args.output}/bench.json, {args.output}/latency.svg")
    return 0


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


if __name__ == "__main__":
    sys.exit(main())
