"""One engine in a process of its own, and the handle that asks it to run.

Engines keep threads that spin for milliseconds after a run, so two in one process disturb each other. Here
each sleeps on its standard input while another runs, and gets one run to warm up before those that count.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOAD_LIMIT_S = 300


@dataclass
class EngineProcess:
    """A running engine.

    Parameters
    ----------
    name
        One of `benchmarks.engines.ENGINES`.
    model
        The ONNX file; ``inputs.npz`` and the bundle lie beside it.
    threads
        Threads it may use.
    """

    name: str
    model: Path
    threads: int

    def __post_init__(self) -> None:
        command = [
            sys.executable,
            "-m",
            "benchmarks.engine_process",
            self.name,
            str(self.model),
            str(self.threads),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.loaded: dict[str, Any] = self._read()

    @property
    def problem(self) -> str | None:
        """Why it does not run this model, or None."""
        return self.loaded.get("problem")

    def times_s(self, runs: int) -> list[float]:
        """Seconds of each of so many runs, after one to warm up."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{runs}\n")
        self._process.stdin.flush()
        times: list[float] = self._read()["times_s"]
        return times

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"problem": f"the process ended with {self._process.wait()}"}
        document: dict[str, Any] = json.loads(line)
        return document


def main(name: str, model: Path, threads: int) -> None:
    """Serve one engine on standard input and output."""
    from benchmarks.engines import ENGINES, UnavailableError, limit_threads

    limit_threads(threads)
    say = sys.stdout
    sys.stdout = sys.stderr  # what engines print is not ours
    with np.load(model.with_name("inputs.npz")) as file:
        inputs = {key: file[key] for key in file.files}
    try:
        start = time.perf_counter()
        run = ENGINES[name](model, inputs, threads)
        outputs = run()
        load_s = time.perf_counter() - start
    except (
        ImportError,
        UnavailableError,
        RuntimeError,
        ValueError,
        KeyError,
        AttributeError,
        TypeError,
    ) as e:
        print(
            json.dumps({"problem": f"{type(e).__name__}: {str(e).splitlines()[0][:200] if str(e) else ''}"}),
            file=say,
            flush=True,
        )
        return
    summary = [[float(np.abs(o).max()), float(np.sum(o, dtype=np.float64))] for o in map(np.asarray, outputs)]
    print(json.dumps({"load_s": load_s, "outputs": summary}), file=say, flush=True)
    for line in sys.stdin:
        run()
        times = []
        for _ in range(int(line)):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        print(json.dumps({"times_s": times}), file=say, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
