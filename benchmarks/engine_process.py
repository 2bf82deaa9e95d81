"""One engine in a separate process, and the handle that makes it run.

Engines keep threads that spin for milliseconds after a run, so two engines in one process disturb each other.
Here each process sleeps on its standard input while another runs, and warms up before the runs that count.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.noise import busy_s, prefer_this_process

# The first load converts the model, which is slow, but must end.
LOAD_LIMIT_S, TURN_LIMIT_S = 600, 120
WARM_S, WARM_RUNS = 0.02, 2
LEAST_RUNS, MOST_RUNS = 3, 400


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's turn.

    Attributes
    ----------
    times_s
        Seconds of each run.
    others_s
        Processor seconds that other processes and the hypervisor used meanwhile.
    wall_s
        Seconds of the turn.
    preempted
        How often a thread of the engine was preempted.
    """

    times_s: list[float]
    others_s: float
    wall_s: float
    preempted: int


class EngineGoneError(Exception):
    """An engine's process ended during measurement; the message says how."""


class EngineProcess:
    """An engine in its process. Loading begins at once; `ready` waits for it.

    Parameters
    ----------
    name
        One of `benchmarks.engines.ENGINES`.
    model
        The ONNX file; its folder also holds `inputs.npz` and our bundles.
    threads
        Threads that the engine may use.
    """

    def __init__(self, name: str, model: Path, threads: int) -> None:
        self.name, self.outputs_path = name, model.with_name(f"outputs-{name}.npz")
        self.outputs_path.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.engine_process", name, str(model), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def ready(self) -> str | None:
        """Wait until the engine has run once; return why it cannot run this model, None if it can."""
        problem: str | None = self._read(LOAD_LIMIT_S).get("problem")
        return problem

    def turn(self, seconds: float) -> Turn:
        """Run the model for about `seconds`.

        Raises
        ------
        EngineGoneError
            If the engine crashed, or took too long.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        document = self._read(TURN_LIMIT_S + seconds)
        if "problem" in document:
            raise EngineGoneError(document["problem"])
        return Turn(**document)

    def outputs(self) -> list[np.ndarray[Any, Any]]:
        """Return the outputs of the first run."""
        with np.load(self.outputs_path) as file:
            return [file[name] for name in file.files]

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self, limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(limit_s, self._process.kill)
        limit.start()
        line = self._process.stdout.readline()
        limit.cancel()
        if not line:
            return {"problem": f"the process ended with {self._process.wait()}"}
        document: dict[str, Any] = json.loads(line)
        return document


def main(name: str, model: Path, threads: int) -> None:
    """Serve one engine on standard input and output."""
    from benchmarks.engines import ENGINES, limit_threads

    limit_threads(threads)
    prefer_this_process()  # before an engine starts threads, which inherit it
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print; standard output is only for our answers
    with np.load(model.with_name("inputs.npz")) as file:
        inputs = {key: file[key] for key in file.files}
    try:
        run = ENGINES[name](model, inputs, threads)
        results = run()
    except Exception as error:  # noqa: BLE001 - the process ends, and reports why
        print(json.dumps({"problem": _one_line(error)}), file=answers, flush=True)
        return
    outputs: dict[str, Any] = {f"{i:03}": np.asarray(o) for i, o in enumerate(results)}
    np.savez(model.with_name(f"outputs-{name}.npz"), **outputs)
    print(json.dumps({}), file=answers, flush=True)
    clock = time.perf_counter
    for line in sys.stdin:
        start, runs = clock(), 0
        while runs < WARM_RUNS or clock() - start < WARM_S:
            run()
            runs += 1
        before, others, start = resource.getrusage(resource.RUSAGE_SELF), busy_s(), clock()
        end = start + float(line)
        times: list[float] = []
        while len(times) < LEAST_RUNS or (clock() < end and len(times) < MOST_RUNS):
            began = clock()
            run()
            times.append(clock() - began)
        wall = clock() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
        own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        document = {
            "times_s": times,
            "others_s": max(0.0, busy_s() - others - own),
            "wall_s": wall,
            "preempted": after.ru_nivcsw - before.ru_nivcsw,
        }
        print(json.dumps(document), file=answers, flush=True)


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
    return text if type(error).__name__ == "UnavailableError" else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
