"""Times our engine and ONNX Runtime in one process, in blocks that take turns.

    python -m benchmarks.zoo.in_turn MODEL THREADS BLOCKS

The folder of the ONNX file MODEL also holds `inputs.npz` and our bundle. One JSON object is printed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.engines import ENGINES, OURS, Run, limit_threads
from benchmarks.noise import PAUSE_S, prefer_this_process

REFERENCE: Final = "onnxruntime"
RUNS: Final = 5


def block_ms(run: Run) -> list[float]:
    """Return the milliseconds of each run of one block, after a pause and a run to warm up."""
    time.sleep(PAUSE_S)
    run()
    times = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def main(model: Path, threads: int, blocks: int) -> None:
    """Measure, and print the times of each engine."""
    limit_threads(threads)
    prefer_this_process()
    with np.load(model.with_name("inputs.npz")) as file:
        inputs = {key: file[key] for key in file.files}
    runs = {name: ENGINES[name](model, inputs, threads) for name in (OURS, REFERENCE)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(blocks):
        for name, run in runs.items():
            times[name] += block_ms(run)
    print(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
