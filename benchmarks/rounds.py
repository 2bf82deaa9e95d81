"""Measures engines in rounds: each engine has a turn in every round, so that drift affects all engines alike.

A turn yields the median of its runs, and an engine's time is the median of its turns. The spread of a ratio
is that of the ratios within a round.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.engine_process import EngineGoneError, EngineProcess
from benchmarks.engines import OURS, UNTUNED
from benchmarks.noise import PAUSE_S, Noise


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our time over another's.

    Attributes
    ----------
    value
        The ratio of the medians.
    low, high
        The quartiles of the ratios within each round.
    least
        The ratio of the fastest turns: the one to trust if other work disturbed most turns.
    """

    value: float
    low: float
    high: float
    least: float


@dataclass
class Measured:
    """Times of one model with one number of threads.

    Attributes
    ----------
    model, threads
        The model's name, and the number of threads.
    turns_ms
        Engine -> median of each of its turns, round by round.
    problems
        Engine -> why it is missing.
    parity
        Engine -> largest relative difference to the reference.
    noise
        How busy the machine was with other work.
    """

    model: str
    threads: int
    turns_ms: dict[str, list[float]] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    parity: dict[str, float] = field(default_factory=dict)
    noise: Noise = field(default_factory=lambda: Noise(0.0, 0.0, 0.0))

    @property
    def median_ms(self) -> dict[str, float]:
        """Engine -> milliseconds of an inference."""
        return {engine: statistics.median(turns) for engine, turns in self.turns_ms.items()}

    @property
    def best_other(self) -> str | None:
        """The fastest engine other than ours, None if there is none."""
        others = {name: ms for name, ms in self.median_ms.items() if name not in (OURS, UNTUNED)}
        return min(others, key=others.__getitem__) if others else None

    def ratio(self, ours: str = OURS, other: str | None = None) -> Ratio | None:
        """Return our time over that of `other`, by default the best; None if either is missing."""
        other = other or self.best_other
        # If no record applies there is only one bundle, which counts as both.
        mine = self.turns_ms.get(ours) or self.turns_ms.get(OURS)
        if mine is None or other is None or other not in self.turns_ms:
            return None
        theirs = self.turns_ms[other]
        within = [a / b for a, b in zip(mine, theirs, strict=True)]
        low, _, high = statistics.quantiles(within, n=4) if len(within) > 1 else (within[0],) * 3
        value = statistics.median(mine) / statistics.median(theirs)
        return Ratio(value, low, high, min(mine) / min(theirs))


def measure(
    name: str,
    model: Path,
    threads: int,
    engines: Sequence[str],
    reference: Sequence[np.ndarray],
    *,
    rounds: int,
    turn_s: float,
) -> Measured:
    """Start the engines, and let them take turns, in another order in each round.

    Parameters
    ----------
    name
        The model's name in the result.
    model, threads, engines
        The ONNX file, the number of threads, and names of `benchmarks.engines.ENGINES`.
    reference
        The outputs to compare with.
    rounds
        The number of turns of each engine.
    turn_s
        Seconds of a turn; a turn is longer if a run takes more than a third of it.
    """
    result = Measured(name, threads)
    started = [EngineProcess(engine, model, threads) for engine in engines]
    turns = []
    try:
        running = []
        for process in started:
            problem = process.ready()
            if problem is None:
                running.append(process)
                result.parity[process.name] = difference(process.outputs(), reference)
            else:
                result.problems[process.name] = problem
        order = random.Random(0)
        for _ in range(rounds):
            for process in order.sample(running, len(running)):
                time.sleep(PAUSE_S)
                try:
                    turn = process.turn(turn_s)
                except EngineGoneError as error:
                    result.problems[process.name] = str(error)
                    result.turns_ms.pop(process.name, None)
                    running.remove(process)
                    continue
                turns.append((turn.wall_s, turn.others_s, turn.preempted))
                result.turns_ms.setdefault(process.name, []).append(statistics.median(turn.times_s) * 1e3)
    finally:
        for process in started:
            process.stop()
    result.noise = Noise.over(turns)
    return result


def difference(outputs: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Return the largest difference of an output, divided by the largest magnitude of its reference.

    Engines name and order outputs differently, and drop a batch of 1, so outputs are matched by size.
    """
    worst = 0.0
    for expected in reference:
        alike = [o for o in outputs if o.size == expected.size]
        if not alike:
            return float("inf")
        scale = float(np.abs(expected).max()) or 1.0
        worst = max(worst, min(float(np.abs(o.ravel() - expected.ravel()).max()) / scale for o in alike))
    return worst
