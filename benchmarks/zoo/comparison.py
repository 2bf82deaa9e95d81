"""Exports, compiles and times models of the zoo. A model that cannot be exported is named and left out."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.engines import OURS, bundle_of
from benchmarks.tables import MISSING, milliseconds
from benchmarks.zoo.in_turn import REFERENCE

BLOCKS: Final = 7
# Far above the goal of 40 s for the slowest model.
COMPILE_LIMIT_S: Final = 300
EXPORT_LIMIT_S, MEASURE_LIMIT_S = 600, 600


class LeftOutError(Exception):
    """A model cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A model's times.

    Attributes
    ----------
    model
        Its name.
    compile_s
        Seconds of import and compilation; None if the bundle was kept.
    times_ms
        Number of threads -> engine -> median milliseconds of a run.
    """

    model: str
    compile_s: float | None
    times_ms: dict[int, dict[str, float]]

    def ratio(self, threads: int) -> float:
        """Return our time over ONNX Runtime's."""
        times = self.times_ms[threads]
        return times[OURS] / times[REFERENCE]


def compare(
    names: Sequence[str],
    threads: Sequence[int],
    folder: Path,
    *,
    blocks: int = BLOCKS,
    keep: bool = False,
    progress: Callable[[str], None],
) -> Iterator[Compared]:
    """Compare each model with ONNX Runtime.

    Parameters
    ----------
    names
        Names of `benchmarks.zoo.models.NAMES`.
    threads
        The numbers of threads.
    folder
        The folder in which each model gets a folder; a model that was exported before is kept.
    blocks
        Turns of each engine.
    keep
        Also keep bundles that exist already.
    progress
        Gets a line for each model.
    """
    for name in names:
        place = folder.resolve() / name
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{name}.onnx"
        try:
            if not path.exists():
                export(name, path)
            seconds = None if keep and bundle_of(path, OURS).exists() else _compile(path)
            result = Compared(name, seconds, {count: measure(path, count, blocks) for count in threads})
        except LeftOutError as error:
            progress(f"without {name}: {error}")
            continue
        ratios = ", ".join(f"{result.ratio(count):.2f} with threads: {count}" for count in threads)
        progress(f"{name}: {ratios} of ONNX Runtime's time")
        yield result


def export(name: str, path: Path) -> None:
    """Write a model as ONNX, in a process of its own: PyTorch takes memory, and starts threads.

    Raises
    ------
    LeftOutError
        If the exporter's packages are missing, or it fails.
    """
    command = [sys.executable, "-m", "benchmarks.zoo.models", name, str(path)]
    _run(command, EXPORT_LIMIT_S, "the export failed")


def _compile(path: Path) -> float:
    """Write the model's bundle and inputs; return the seconds of import and compilation."""
    command = [sys.executable, "-m", "benchmarks.zoo.compiling", str(path)]
    return float(_run(command, COMPILE_LIMIT_S, "it does not compile").splitlines()[-1])


def measure(path: Path, threads: int, blocks: int) -> dict[str, float]:
    """Return the median milliseconds of both engines.

    Raises
    ------
    LeftOutError
        If an engine fails, or takes too long.
    """
    command = [sys.executable, "-m", "benchmarks.zoo.in_turn", str(path), str(threads), str(blocks)]
    times = json.loads(_run(command, MEASURE_LIMIT_S, "measuring failed").splitlines()[-1])
    return {engine: statistics.median(values) for engine, values in times.items()}


def _run(command: Sequence[str], limit_s: float, problem: str) -> str:
    """Run a process; return what it printed."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LeftOutError(f"{problem}: it took more than {limit_s:.0f} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise LeftOutError(f"{problem}: {reason[:200]}")
    return done.stdout


def geometric_mean(results: Sequence[Compared], threads: int) -> float:
    """Return the geometric mean of the ratios."""
    return statistics.geometric_mean([result.ratio(threads) for result in results])


def rows(results: Sequence[Compared]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: a row for each model, slowest ratio first, and the geometric means."""
    counts = sorted({count for result in results for count in result.times_ms})
    heads = ["model"]
    for count in counts:
        heads += [f"ours, threads: {count}", "ONNX Runtime", "ratio"]
    body = []
    for result in sorted(results, key=lambda each: -each.ratio(counts[-1])):
        cells = [result.model]
        for count in counts:
            times = result.times_ms[count]
            cells += [milliseconds(times[OURS]), milliseconds(times[REFERENCE]), f"{result.ratio(count):.2f}"]
        body.append([*cells, MISSING if result.compile_s is None else f"{result.compile_s:.1f}"])
    last = ["geometric mean"]
    for count in counts:
        last += ["", "", f"{geometric_mean(results, count):.2f}"]
    compiled = [result.compile_s for result in results if result.compile_s is not None]
    middle = f"{statistics.median(compiled):.1f} (median)" if compiled else MISSING
    return [*heads, "compile, s"], [*body, [*last, middle]]
