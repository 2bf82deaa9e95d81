"""`make bench-arm`: instructions per inference on an emulated Cortex-A72, our engine against others.

Time under an emulator means nothing; the number of executed instructions is exact and the same every
time. But it is not a time either: cores take different numbers of cycles for the same instructions.
llvm-mca estimates how fast a core could run our hot loops, and `--times` estimates an inference with a model
of the board's caches and memory (`benchmarks/estimates`); no board is timed. Counts and times of the other
engines are kept between runs.

    python -m benchmarks.bench_arm --models mobilenetv2 --times
    python -m benchmarks.bench_arm --models squeezenet1_1 model.onnx   # of the zoo, or your own
    python -m benchmarks.bench_arm --markdown      # the tables of the last run, for docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from rich.console import Console

from benchmarks import hot_loops, pictures, tables
from benchmarks.engines import (
    OURS,
    TITLES,
    UNTUNED,
    UnavailableError,
    convert_for_litert,
    convert_for_ncnn,
    float_of,
    simplified_of,
)
from benchmarks.estimates.board import boards
from benchmarks.estimates.estimate import Estimate
from benchmarks.estimates.inference import of_engine
from benchmarks.instructions.emulator import Emulator
from benchmarks.prepare import (
    HALVES,
    HALVES_SUFFIX,
    HEADLINE,
    INT8,
    MODELS,
    fixed_shapes,
    source,
)
from benchmarks.quantised import SUFFIX
from benchmarks.requirements import RequirementError
from benchmarks.rounds import difference
from benchmarks.zoo.comparison import LeftOutError
from benchmarks.zoo.models import NAMES

# Engines add in different orders, and Winograd's transforms lose precision. More means another network.
LARGEST_DIFFERENCE: Final = 1e-2
# In int8, engines round numbers that are halfway between two steps differently, and later layers amplify it.
LARGEST_DIFFERENCE_INT8: Final = 0.5
# In float16, a MobileNetV2 with seeded weights has 29 dB.
LARGEST_DIFFERENCE_HALVES: Final = 0.2
ENGINES: Final = (OURS, UNTUNED, "onnxruntime", "ncnn", "litert")
TARGETS: Final = {"cortex-a53": "rpi3", "cortex-a72": "rpi4", "cortex-a76": "rpi5"}
HALVES_CPU: Final = "cortex-a76"
HALVES_NAMES: Final = frozenset(HALVES)
_KNOWN: Final = frozenset((*MODELS, *HALVES, *NAMES))
# What an engine's converter writes.
_CONVERTED: Final = {"ncnn": "model.ncnn.param", "litert": "model.tflite"}
AT_ONCE: Final = 2
MARKDOWN: Final = "bench-arm.md"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model, with the files that the guest reads.

    Attributes
    ----------
    place
        The folder with the files.
    reference
        The outputs of the reference implementation.
    flops
        Kernel -> floating-point operations in an inference.
    """

    place: Path
    reference: list[np.ndarray[Any, Any]]
    flops: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was found out about a model.

    Attributes
    ----------
    counts
        Engine -> millions of instructions.
    loops
        Core -> the hot loops of our kernels; empty without llvm-mca.
    times
        Engine -> number of threads -> estimate; empty unless they were asked for.
    """

    counts: Mapping[str, float]
    loops: Mapping[str, Sequence[hot_loops.Loop]]
    times: Mapping[str, Mapping[int, Estimate]]


# Title, headings and cells.
Table = tuple[str, list[str], list[list[str]]]


def prepare(
    name: str, folder: Path, target: str, records: str | None, engines: Collection[str] = ENGINES
) -> Prepared:
    """Write what the guest reads: the model as each engine takes it, our bundle's members, the inputs."""
    from agent.bundle.graph import Graph
    from builder import compile
    from builder.compiling.parity import run_as_defined
    from builder.compiling.sample_inputs import make_inputs
    from builder.importer import import_onnx
    from builder.quantising.halves import to_halves
    from builder.target.device_target import resolve

    path = _saved(name, folder / target if name in INT8 else folder, target)
    place = path.parent
    model = import_onnx(path, input_shapes=fixed_shapes(name))
    inputs: dict[str, Any] = make_inputs(model.inputs, model.onnx)
    np.savez(place / "inputs.npz", **inputs)
    if name in HALVES:
        model = to_halves(model, resolve(target)).model
    package = compile(model, target, tuning_records=records)
    _write_members(package.members, place)
    shutil.rmtree(place / UNTUNED, ignore_errors=True)
    if name not in HALVES and records is not None:
        _write_members(compile(model, target).members, place / UNTUNED)
    if name not in HALVES:
        onnx.save(model.onnx, simplified_of(path))
        if name in INT8 and not float_of(path).exists():
            before = import_onnx(source(name.removesuffix(SUFFIX)), input_shapes=fixed_shapes(name))
            onnx.save(before.onnx, float_of(path))
        _convert(path, inputs, engines)
    flops: dict[str, float] = {}
    for node in Graph.from_json(package.members["mod.json"]).nodes:
        if "flops" in node.attrs and "weights" not in node.func_name:
            flops[node.func_name] = flops.get(node.func_name, 0.0) + float(node.attrs["flops"])
    return Prepared(place, run_as_defined(model.onnx, inputs), flops)


def _write_members(members: Mapping[str, bytes], place: Path) -> None:
    place.mkdir(exist_ok=True)
    for member, data in members.items():
        if "/" not in member:
            (place / member).write_bytes(data)


def _saved(name: str, folder: Path, target: str = "host") -> Path:
    """Save a model in a folder of its own and return its path; what was made of another file is deleted."""
    path = folder / Path(name).name / "model.onnx"
    if name not in _KNOWN:
        content = source(name).SerializeToString()
        if path.exists() and path.read_bytes() != content:
            shutil.rmtree(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    elif not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(source(name, target), path)
    return path


def _convert(path: Path, inputs: Mapping[str, np.ndarray[Any, Any]], engines: Collection[str]) -> None:
    """Write what ncnn and LiteRT read, if they are among `engines`; say which cannot take the model."""
    for engine, convert in (("ncnn", _for_ncnn), ("litert", _for_litert)):
        if engine in engines and not (path.parent / _CONVERTED[engine]).exists():
            try:
                convert(path, inputs)
            except UnavailableError as error:
                (path.parent / _CONVERTED[engine]).unlink(missing_ok=True)  # with operators that it lacks
                print(f"  without {TITLES[engine]}: {error}")


def _for_ncnn(path: Path, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
    if len(inputs) != 1:
        raise UnavailableError(f"expected one input, got {len(inputs)}")
    stem = convert_for_ncnn(path, next(iter(inputs.values())).shape)
    for part in ("param", "bin"):
        converted = Path(f"{stem}.ncnn.{part}")
        if converted != path.with_name(f"model.ncnn.{part}"):
            shutil.copy(converted, path.with_name(f"model.ncnn.{part}"))


def _for_litert(path: Path, inputs: Mapping[str, np.ndarray[Any, Any]]) -> None:
    convert_for_litert(path, inputs, path.parent / _CONVERTED["litert"])


def count(emulator: Emulator, engine: str, prepared: Prepared, cpu: str) -> float | None:
    """Return millions of instructions, None if another engine cannot run the model; reuse others' counts.

    Raises
    ------
    RuntimeError
        If our engine fails, or has other results than the reference.
    """
    try:
        return _counted(emulator, engine, prepared, cpu)
    except RuntimeError as error:
        if engine in (OURS, UNTUNED):
            raise
        print(f"  without {TITLES[engine]}: {error}")
        return None


def _counted(emulator: Emulator, engine: str, prepared: Prepared, cpu: str) -> float | None:
    place = prepared.place
    kept = place / f"count-{engine}-{emulator.version(engine)}-{cpu}.json"
    if engine in (OURS, UNTUNED):
        if engine == UNTUNED and not (place / UNTUNED).exists():
            return None
        kept.unlink(missing_ok=True)
    elif engine in _CONVERTED and not (place / _CONVERTED[engine]).exists():
        return None
    if not kept.exists():
        counted = emulator.instructions_of_an_inference(engine, place, cpu)
        with np.load(place / f"outputs-arm-{engine}.npz") as file:
            error = difference([file[name] for name in file.files], prepared.reference)
        kept.write_text(json.dumps({"instructions": counted, "difference": error}) + "\n")
    document = json.loads(kept.read_text())
    most = _largest_difference(place.name)
    if not document["difference"] <= most:
        raise RuntimeError(
            f"{engine} under qemu: expected a relative difference of at most {most:.0e}, "
            f"got {document['difference']:.1e}"
        )
    return float(document["instructions"]) / 1e6


def _largest_difference(model: str) -> float:
    if model in INT8:
        return LARGEST_DIFFERENCE_INT8
    return LARGEST_DIFFERENCE_HALVES if model in HALVES else LARGEST_DIFFERENCE


def main(arguments: Sequence[str] | None = None) -> int:
    """Count instructions, compare engines, print and write the results; return the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.cpu != HALVES_CPU and not HALVES_NAMES.isdisjoint(args.models):
        parser.error(
            f"--models: models in float16 need --cpu {HALVES_CPU}, which computes in it, got {args.cpu}"
        )
    if args.markdown:
        return tables.print_file(args.output / MARKDOWN)
    console = Console(width=None if sys.stdout.isatty() else 160)
    began = time.perf_counter()
    try:
        emulator = Emulator.prepare()
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found: dict[str, Measured] = {}
    for given in args.models:
        try:
            found[Path(given).name] = _measure(given, emulator, args, console)
        except LeftOutError as error:
            print(f"error: {given}: {error}", file=sys.stderr)
            return 2
    counts = {name: each.counts for name, each in found.items()}
    parts, means = _tables(found, args.cpu), _means(counts)
    for title, heads, body in parts:
        tables.show(console, title, heads, body)
    for line in means:
        console.print(line, highlight=False)
    seconds = time.perf_counter() - began
    args.output.mkdir(parents=True, exist_ok=True)
    document = _document(found, args.cpu) | {"seconds": seconds}
    (args.output / "bench-arm.json").write_text(json.dumps(document, indent=1) + "\n")
    (args.output / MARKDOWN).write_text(_markdown(parts, means, args.cpu))
    title = f"Millions of instructions per inference: {args.cpu} emulated, one thread"
    pictures.instructions(counts, args.output / "instructions.png", title)
    if loops := _loops(found):
        title = "Hot loops by llvm-mca, no board timed: share of the core's multiply-add peak"
        pictures.hot_loops(loops, args.output / "hot-loops.png", title)
    pictures.publish([args.output / "instructions.png", args.output / "hot-loops.png"], args.pictures)
    console.print(f"{seconds:.0f} s; written: {args.output}/bench-arm.json, {MARKDOWN}, pictures")
    return 0


def _measure(given: str, emulator: Emulator, args: argparse.Namespace, console: Console) -> Measured:
    """Count one model's instructions with each engine, and say them.

    Raises
    ------
    LeftOutError
        If the model cannot be compared.
    """
    target, name = TARGETS[args.cpu], Path(given).name
    model = prepare(given, args.output.resolve() / "models", target, args.tuning_records, args.engines)
    # No other engine is given a float16 network: it is compared with ours in float32.
    engines = [OURS] if name in HALVES else args.engines
    with ThreadPoolExecutor(AT_ONCE) as pool:
        asked = [pool.submit(count, emulator, engine, model, args.cpu) for engine in engines]
        found = {engine: each.result() for engine, each in zip(engines, asked, strict=True)}
    counts = {engine: value for engine, value in found.items() if value is not None}
    summary = ", ".join(f"{engine} {value:.1f}" for engine, value in counts.items())
    console.print(f"{name}: {summary} million instructions", highlight=False)
    times: dict[str, Mapping[int, Estimate]] = {}
    if args.times:
        board = boards()[target]
        times = {
            engine: of_engine(emulator, engine, model.place, board, keep=engine not in (OURS, UNTUNED))
            for engine in counts
        }
    loops: Mapping[str, Sequence[hot_loops.Loop]] = {}
    if name not in HALVES:  # whose loops are not those of the ONNX file
        try:
            code = hot_loops.kernels_object(model.place / "model.onnx", fixed_shapes(name), target)
            loops = hot_loops.of_model(code, model.flops)
        except RequirementError as error:
            console.print(f"  without llvm-mca: {error}", highlight=False)
    return Measured(counts, loops if all(loops.values()) else {}, times)


def _loops(found: Mapping[str, Measured]) -> dict[str, Mapping[str, Sequence[hot_loops.Loop]]]:
    return {name: each.loops for name, each in found.items() if each.loops}


def _times(found: Mapping[str, Measured]) -> dict[str, Mapping[str, Mapping[int, Estimate]]]:
    return {name: each.times for name, each in found.items() if each.times}


def _document(found: Mapping[str, Measured], cpu: str) -> dict[str, Any]:
    """Return everything that was measured, for JSON."""
    counts = {name: each.counts for name, each in found.items()}
    return {
        "cpu": cpu,
        "millions": counts,
        "over_the_best": {ours: ratios(counts, ours) for ours in (UNTUNED, OURS)},
        "hot_loops": {
            name: {core: [asdict(loop) for loop in each] for core, each in by_core.items()}
            for name, by_core in _loops(found).items()
        },
        "board": boards()[TARGETS[cpu]].name,
        "times": {
            name: {
                engine: {n: asdict(each) for n, each in threads.items()}
                for engine, threads in by_engine.items()
            }
            for name, by_engine in _times(found).items()
        },
    }


def _tables(found: Mapping[str, Measured], cpu: str) -> list[Table]:
    """Return the tables: those of instructions, and what else was measured."""
    counts = {name: each.counts for name, each in found.items()}
    parts: list[Table] = [(f"Millions of instructions, {cpu}", *rows(counts))]
    if times := _times(found):
        board = boards()[TARGETS[cpu]]
        parts.append((f"Estimated milliseconds, {board.name}, no board timed", *time_rows(times)))
    if loops := _loops(found):
        parts.append(("Hot loops by llvm-mca, share of the core's peak", *loop_rows(loops)))
    return parts


def _means(counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines below the tables."""
    floats = {name: each for name, each in counts.items() if name not in INT8}
    means = [
        f"geometric mean over the best{', untuned' if ours == UNTUNED else ''}: "
        f"{statistics.geometric_mean(ratios(floats, ours).values()):.3f}"
        for ours in (UNTUNED, OURS)
        if ratios(floats, ours)
    ]
    integers = ratios({name: each for name, each in counts.items() if name in INT8}, OURS)
    if integers:
        means.append(
            f"geometric mean over the best, int8: {statistics.geometric_mean(integers.values()):.3f}"
        )
    for precision, suffix in (("int8", SUFFIX), ("fp16", HALVES_SUFFIX)):
        over = tables.over_float32(counts, OURS, suffix)
        means += [f"{precision} over float32, {name}: {ratio:.2f}" for name, ratio in over.items()]
    return means


def _markdown(parts: Sequence[Table], means: Sequence[str], cpu: str) -> str:
    """Return the tables and the lines below them for docs/benchmarks.md."""
    lines = [
        f"Millions of instructions per inference, one thread, float32 unless int8 or fp16, {cpu} emulated.",
        "",
    ]
    for title, heads, body in parts:
        lines += [] if heads is parts[0][1] else [f"{title}:", ""]
        lines += [tables.markdown(heads, body), ""]
    return "\n".join([*lines, *(f"- {line}" for line in means)]) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.bench_arm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models", nargs="+", type=_model, default=list(HEADLINE), metavar="MODEL",
        help=f"of {', '.join((*MODELS, *HALVES))}; of the zoo; or an ONNX file "
        f"(default: {' '.join(HEADLINE)})",
    )  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--cpu", choices=list(TARGETS), default="cortex-a72")
    parser.add_argument(
        "--times", action="store_true", help="also estimate times with one thread and with four"
    )
    parser.add_argument("--tuning-records", metavar="DIR", help="compile with these records")
    parser.add_argument("--output", type=Path, default=Path("build/bench-arm"), help="folder for the results")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="also copy the pictures to this folder")
    parser.add_argument("--markdown", action="store_true", help="print the tables of the last run and exit")
    return parser


def _model(text: str) -> str:
    """Return the name of a model, or the path of an ONNX file, as it was given.

    Raises
    ------
    ArgumentTypeError
        If it is neither.
    """
    if text in _KNOWN or (Path(text).suffix == ".onnx" and Path(text).is_file()):
        return text
    raise argparse.ArgumentTypeError(f"expected a model or an ONNX file with fixed shapes, got {text!r}")


def ratios(counts: Mapping[str, Mapping[str, float]], ours: str) -> dict[str, float]:
    """Return our instructions over those of the best other engine, by model."""
    found = {}
    for model, by_engine in counts.items():
        others = [value for engine, value in by_engine.items() if engine not in (OURS, UNTUNED)]
        mine = by_engine.get(ours, by_engine.get(OURS))
        if others and mine is not None:
            found[model] = mine / min(others)
    return found


def rows(counts: Mapping[str, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return the table's headings and cells: one row for each model."""
    heads = ["model", TITLES[UNTUNED], *(TITLES[name] for name in ENGINES if name != UNTUNED)]
    heads += ["over the best, untuned", "over the best"]
    body = []
    for model, by_engine in counts.items():
        cells = [by_engine.get(UNTUNED, by_engine.get(OURS))]
        cells += [by_engine.get(name) for name in ENGINES if name != UNTUNED]
        over = [ratios(counts, ours).get(model) for ours in (UNTUNED, OURS)]
        body.append(
            [model]
            + [tables.MISSING if cell is None else f"{cell:.1f}" for cell in cells]
            + [tables.MISSING if ratio is None else f"{ratio:.2f}" for ratio in over]
        )
    return heads, body


def time_rows(
    times: Mapping[str, Mapping[str, Mapping[int, Estimate]]],
) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: one row for each model and number of threads."""
    engines = [UNTUNED, *(name for name in ENGINES if name != UNTUNED)]
    body = []
    for model, by_engine in times.items():
        for threads in next(iter(by_engine.values())):
            ms = {engine: each[threads].ns / 1e6 for engine, each in by_engine.items()}
            cells = [ms.get(engine, ms.get(OURS) if engine == UNTUNED else None) for engine in engines]
            over = ratios({model: ms}, OURS).get(model)
            body.append(
                [model, str(threads)]
                + [tables.MISSING if cell is None else f"{cell:.1f}" for cell in cells]
                + [tables.MISSING if over is None else f"{over:.2f}"]
            )
    return ["model", "threads", *(TITLES[engine] for engine in engines), "over the best"], body


def loop_rows(
    loops: Mapping[str, Mapping[str, Sequence[hot_loops.Loop]]],
) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: one row for each model, its loops weighted by their operations."""
    cores = list(hot_loops.CORES)
    body = []
    for model, by_core in loops.items():
        cells = [model, str(len(by_core[cores[0]]))]
        for core in cores:
            each = by_core[core]
            cells.append(f"{sum(x.flops for x in each) / sum(x.flops / x.share for x in each):.0%}")
            worst = min(each, key=lambda x: x.share)
            cells.append(f"{worst.share:.0%} ({worst.kernel})")
        body.append(cells)
    heads = ["model", "loops"]
    for core in cores:
        heads += [core, "least"]
    return heads, body


if __name__ == "__main__":
    sys.exit(main())
