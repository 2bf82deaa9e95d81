"""Forests in edgebundle, ONNX Runtime, treelite (tl2cgen) and lleaves: one thread, measured in turn.

`python -m benchmarks.trees` trains each forest with LightGBM on random numbers, compiles it for this machine
with every engine that is installed (`pip install treelite tl2cgen lleaves "llvmlite<0.45"`), checks that all
give the same numbers, and prints each engine's time and edgebundle's share of the best one. An engine is
called as its users call it from Python, which takes longer than a small forest. Each call has other samples:
a processor learns the branches of one that is repeated by heart. A block of calls takes some milliseconds;
the engines take turns, and the least and the median time of all blocks count.
Goal: at most 0.7 of the best at batch 1, 0.9 at batch 64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import lightgbm
import numpy as np
import onnxruntime
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from builder import compile, load
from builder.importer.classic.boosted import to_onnx
from builder.importer.classic.lightgbm_file import read_lightgbm
from builder.running.local_run import prepared

# Trees, depth, features.
FORESTS: Final = tuple(
    (trees, depth, features) for trees, depth in ((10, 4), (100, 6), (500, 8)) for features in (20, 200)
)
BATCHES: Final = (1, 64)
GOALS: Final = {1: 0.7, 64: 0.9}
BLOCK_S: Final = 0.004
_SAMPLES: Final = 5000
# Inputs of calls, which follow one another in turn: more than a processor remembers the branches of.
_CALLS: Final = 64

Floats = NDArray[np.float32]
Predict = Callable[[Floats], object]


@dataclass(frozen=True, slots=True)
class Result:
    """Times of one forest at one batch.

    Attributes
    ----------
    trees, depth, features, batch
        The forest, and how many samples a call has.
    least_us, median_us
        Engine -> microseconds of a call.
    """

    trees: int
    depth: int
    features: int
    batch: int
    least_us: dict[str, float]
    median_us: dict[str, float]

    def share(self, times: dict[str, float]) -> float:
        """Return edgebundle's time over that of the best other engine."""
        return times["edgebundle"] / min(time for name, time in times.items() if name != "edgebundle")


def train(trees: int, depth: int, features: int, path: Path) -> None:
    """Train a forest, whose trees are as deep as they may be, and save it."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((_SAMPLES, features))
    y = np.sin(x[:, :5]).sum(1) + draw.standard_normal(_SAMPLES)
    parameters = {
        "objective": "regression", "max_depth": depth, "num_leaves": 2**depth, "min_data_in_leaf": 2,
        "num_threads": 1, "verbose": -1, "feature_fraction": 0.5,
    }  # fmt: skip
    lightgbm.train(parameters, lightgbm.Dataset(x, y), trees).save_model(path)


def edgebundle(path: Path, batch: int, features: int) -> Predict:
    """Compile for this machine; the executor that devices use."""
    package = compile(load(path, input_shapes={"features": (batch, features)}), target="host")
    module = prepared(package, 1)

    def predict(x: Floats) -> object:
        module.set_input("features", x)
        module.run()
        return module.get_output(0)

    return predict


def onnx_runtime(path: Path, batch: int, features: int) -> Predict:
    """Load the same forest as ONNX."""
    del batch, features
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = to_onnx(read_lightgbm(path)[0], "trees").SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"features": x})[0]


def treelite(path: Path, batch: int, features: int) -> Predict:
    """Compile with tl2cgen, by the system's C compiler."""
    import tl2cgen
    import treelite as frontend

    del batch, features
    model = frontend.frontend.load_lightgbm_model(str(path))
    library = path.with_suffix(".so")
    if not library.exists():
        tl2cgen.export_lib(
            model, toolchain="gcc", libpath=str(library), params={"parallel_comp": 8}, verbose=False
        )
    predictor = tl2cgen.Predictor(str(library), nthread=1)
    return lambda x: predictor.predict(tl2cgen.DMatrix(x))


def lleaves(path: Path, batch: int, features: int) -> Predict:
    """Compile with lleaves, by LLVM."""
    import lleaves as engine

    del batch, features
    model = engine.Model(model_file=str(path))
    cache = path.with_suffix(".elf")
    model.compile(cache=str(cache))
    return lambda x: model.predict(x, n_jobs=1)


ENGINES: Final[dict[str, Callable[[Path, int, int], Predict]]] = {
    "edgebundle": edgebundle, "ONNX Runtime": onnx_runtime, "treelite": treelite, "lleaves": lleaves,
}  # fmt: skip


def measure(
    engines: dict[str, Predict], inputs: Sequence[Floats], blocks: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the least and the median time of a call, in microseconds; the calls' inputs take turns."""
    counts = {}
    for name, predict in engines.items():
        predict(inputs[0])
        start = time.perf_counter()
        predict(inputs[0])
        counts[name] = max(1, round(BLOCK_S / max(time.perf_counter() - start, 1e-6)))
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(blocks):
        for name, predict in engines.items():
            predict(inputs[-1])
            given = list(itertools.islice(itertools.cycle(inputs), counts[name]))
            start = time.perf_counter()
            for x in given:
                predict(x)
            found[name].append((time.perf_counter() - start) / counts[name] * 1e6)
    least = {name: min(times) for name, times in found.items()}
    return least, {name: statistics.median(times) for name, times in found.items()}


def compare(trees: int, depth: int, features: int, blocks: int, batches: Sequence[int]) -> list[Result]:
    """Measure one forest with every engine that is installed.

    Raises
    ------
    ValueError
        If an engine gives other numbers.
    """
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "forest.txt"
        train(trees, depth, features, path)
        for batch in batches:
            draw = np.random.default_rng(1)
            inputs = list(draw.standard_normal((_CALLS, batch, features)).astype(np.float32))
            x = inputs[0]
            engines: dict[str, Predict] = {}
            for name, make in ENGINES.items():
                try:
                    engines[name] = make(path, batch, features)
                except ImportError:
                    continue
            wanted = lightgbm.Booster(model_file=path).predict(x.astype(np.float64))
            for name, predict in engines.items():
                got = np.asarray(predict(x)).reshape(-1)
                if not np.allclose(got, wanted, rtol=1e-4, atol=1e-4):
                    raise ValueError(f"{name}: expected LightGBM's numbers, got {got[:3]} for {wanted[:3]}")
            results.append(Result(trees, depth, features, batch, *measure(engines, inputs, blocks)))
    return results


def main() -> int:
    """Measure the forests and print a table; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trees", description=__doc__)
    parser.add_argument("--blocks", type=int, default=100, help="blocks of calls (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=500, help="leave larger forests out (default: 500)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, not a table")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("trees", "depth", "features", "batch", *ENGINES, "of the best: least", "median")
    missed = False
    for trees, depth, features in FORESTS:
        if trees > options.largest:
            continue
        for result in compare(trees, depth, features, options.blocks, BATCHES):
            least, median = result.share(result.least_us), result.share(result.median_us)
            missed |= least > GOALS[result.batch]
            if options.json:
                print(json.dumps(asdict(result)), flush=True)
            times = [f"{result.least_us[name]:.1f}" if name in result.least_us else "" for name in ENGINES]
            table.add_row(
                *map(str, (trees, depth, features, result.batch)), *times, f"{least:.2f}", f"{median:.2f}"
            )
    if not options.json:
        console.print(table)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
