"""Measures points on this machine: user cycles on one thread, and time on two."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.shipped_records.builders import Builders, Candidates
from benchmarks.shipped_records.measure import LEAST_GAIN, Verdict
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.target.device_target import DeviceTarget

ROUNDS, PAIRS = 5, 21
TIMEOUT_S: Final = 300
# Two threads are measured by the clock: a speed of at least this share of the heuristic's counts as equal.
NOT_SLOWER: Final = 0.98


class Cycles:
    """Measures in cycles of this machine's cores.

    Parameters
    ----------
    target
        The device, which must be this machine.
    prefix
        A command that wraps the final comparisons, such as one that waits for a quiet machine.
    niceness
        The niceness of compiling.
    """

    def __init__(self, target: DeviceTarget, prefix: Sequence[str], niceness: int = 5) -> None:
        self._target, self._prefix = target, list(prefix)
        self._builders = Builders(niceness)
        self.sentence = (
            f"user cycles of one thread on {_cpu()} ({target.simd.lanes} lanes), each in turn with the "
            f"heuristic's choice, {PAIRS} pairs; kept from a median of {LEAST_GAIN:g} on, where two threads "
            "are not slower"
        )

    def costs(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[dict[Decisions, float | None]]:
        """Return the least cycles of a few measurements of each point; the points of a task take turns."""
        built = self._builders.build(asked, linked=True)
        # The machine may be busy: cycles are counted per thread, and promising points are compared again.
        jobs = [_Job(c, ROUNDS, 1) for c in built if c is not None]
        rounds = iter(self._time(jobs, prefix=()))
        results: list[dict[Decisions, float | None]] = []
        for (_, decisions), candidates in zip(asked, built, strict=True):
            costs: dict[Decisions, float | None] = dict.fromkeys(decisions)
            if candidates is not None:
                costs.update(zip(candidates.decisions, map(min, next(rounds)), strict=True))
            results.append(costs)
        return results

    def verdicts(self, asked: Sequence[tuple[Sequence[Task], Decisions]]) -> list[Verdict]:
        """Compare points with the heuristic's in pairs: on one thread by cycles, on two by the clock."""
        flat = [(task, (task.space.default, point)) for tasks, point in asked for task in tasks]
        built = self._builders.build(flat, linked=True)
        both = [c for c in built if c is not None and len(c.decisions) == 2]
        jobs = [_Job(c, PAIRS, threads) for threads in (1, 2) for c in both]
        found = self._time(jobs, prefix=self._prefix)
        one, two = found[: len(both)], found[len(both) :]
        timed = {id(c): (a, b) for c, a, b in zip(both, one, two, strict=True)}
        verdicts, left = [], iter(built)
        for tasks, _ in asked:
            pairs = [timed.get(id(next(left))) for _ in tasks]
            verdicts.append(_verdict([p for p in pairs if p is not None], whole=None not in pairs))
        return verdicts

    def close(self) -> None:
        """End the building processes."""
        self._builders.close()

    def _time(self, jobs: Sequence[_Job], prefix: Sequence[str]) -> list[list[list[float]]]:
        """Return the measurements: job -> kernel -> round -> cycles, or nanoseconds on two threads."""
        if not jobs:
            return []
        with tempfile.TemporaryDirectory() as folder:
            written: list[dict[str, Any]] = []
            for number, job in enumerate(jobs):
                code = Path(folder, f"{number}.so")
                code.write_bytes(job.candidates.code)
                kernels = list(range(len(job.candidates.decisions)))
                arguments = job.candidates.arguments
                written.append(
                    {"code": str(code), "arguments": arguments, "kernels": kernels, "rounds": job.rounds}
                    | {"threads": job.threads}
                )
            file = Path(folder, "jobs.json")
            file.write_text(json.dumps(written))
            timer = Path(__file__).with_name("timer.py")
            done = subprocess.run(
                [*prefix, sys.executable, str(timer), str(file)],
                capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
            )  # fmt: skip
            result: list[list[list[float]]] = json.loads(done.stdout)
            return result


@dataclass(frozen=True, slots=True)
class _Job:
    """Candidates of a task, which of them to measure, how often, and on how many threads."""

    candidates: Candidates
    rounds: int
    threads: int


def _verdict(pairs: Sequence[tuple[list[list[float]], list[list[float]]]], *, whole: bool) -> Verdict:
    """Return the verdict over a signature's kernels: the one with the smallest gain decides."""
    gains, lows, twos = [], [], []
    for (old, new), (old2, new2) in pairs:
        ratios = sorted(a / b for a, b in zip(old, new, strict=True))
        gains.append(statistics.median(ratios))
        lows.append(ratios[len(ratios) // 4])
        twos.append(min(old2) / min(new2))
    if not gains:
        return Verdict(0.0, False, "did not run")
    holds = whole and min(gains) >= LEAST_GAIN and min(lows) > 1.0 and min(twos) >= NOT_SLOWER
    return Verdict(
        min(gains), holds, f"{min(gains):.3f} (quartile {min(lows):.3f}), two threads {min(twos):.3f}"
    )


def _cpu() -> str:
    """Return the name of this machine's CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "this CPU")
