"""``make bench-arm``: executed instructions of an inference on an emulated Cortex-A72, ours against others.

Time under an emulator means nothing; the number of instructions is exact and the same every time. No board
was timed: a core may take more or fewer cycles for the same instructions.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import onnx

from benchmarks.architectures import generate
from benchmarks.instructions.emulator import Emulator

MODELS = ("resnet18", "resnet50", "mobilenetv2", "bert")
ENGINES = ("edgebundle", "onnxruntime", "ncnn")
SEQUENCE = 128


def prepare(name: str, folder: Path, records: str | None) -> Path:
    """Lay out what the guest reads: the ONNX file, ncnn's files, our members, the inputs."""
    from benchmarks.engines import UnavailableError, load_ncnn
    from builder import compile
    from builder.importer import import_onnx
    from builder.sample_inputs import record

    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    path = place / "model.onnx"
    if not path.exists():
        onnx.save(generate(name), path)
    shapes = None
    if name == "bert":
        shapes = {key: [1, SEQUENCE] for key in ("input_ids", "attention_mask", "token_type_ids")}
    model = import_onnx(path, input_shapes=shapes)
    inputs = record(model.inputs, model.onnx)
    np.savez(place / "inputs.npz", **inputs)
    options = {"tuning_records": records} if records else {}
    for member, data in compile(model, "rpi4", **options).members.items():
        if "/" not in member:
            (place / member).write_bytes(data)
    try:
        load_ncnn(path, inputs, 1)
    except UnavailableError as e:
        print(f"  {name} without ncnn: {e}")
    return place


def main() -> int:
    """Count, compare and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cpu", default="cortex-a72")
    parser.add_argument("--tuning-records", metavar="DIR")
    parser.add_argument("--output", type=Path, default=Path("build/bench-arm"))
    args = parser.parse_args()
    emulator = Emulator.prepare()
    print("| model | " + " | ".join(args.engines) + " | ours / best other |   (millions of instructions)")
    print("|---|" + "---|" * (len(args.engines) + 1))
    results: dict[str, dict[str, float]] = {}
    for name in args.models:
        place = prepare(name, args.output.resolve(), args.tuning_records)
        counts = {}
        for engine in args.engines:
            if engine == "ncnn" and not (place / "model.ncnn.param").exists():
                continue
            counts[engine] = emulator.instructions_of_an_inference(engine, place, args.cpu) / 1e6
        results[name] = counts
        cells = [f"{counts[e]:.1f}" if e in counts else "-" for e in args.engines]
        print(f"| {name} | " + " | ".join(cells) + f" | {_ratio(counts) or float('nan'):.2f} |", flush=True)
    ratios = [ratio for counts in results.values() if (ratio := _ratio(counts)) is not None]
    if ratios:
        print(f"geometric mean of ours over the best other engine: {statistics.geometric_mean(ratios):.3f}")
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "bench-arm.json").write_text(
        json.dumps({"cpu": args.cpu, "millions": results}, indent=1) + "\n"
    )
    return 0


def _ratio(counts: dict[str, float]) -> float | None:
    others = [count for engine, count in counts.items() if engine != "edgebundle"]
    return counts["edgebundle"] / min(others) if others and "edgebundle" in counts else None


if __name__ == "__main__":
    sys.exit(main())
