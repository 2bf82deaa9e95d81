"""Timing of calls, summarised as TVM does.

Promises to measure as TVM's time evaluator did: one call to warm up, then `repeat` results, each the mean of
`number` calls, in seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """Times of a call, in seconds; printed in milliseconds.

    Attributes
    ----------
    results
        Mean time of a call for each repeat, in seconds; at least one.
    """

    results: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean of the results, in seconds."""
        return statistics.fmean(self.results)

    @property
    def median(self) -> float:
        """Median of the results, in seconds."""
        return statistics.median(self.results)

    @property
    def min(self) -> float:
        """Smallest of the results, in seconds."""
        return min(self.results)

    @property
    def max(self) -> float:
        """Largest of the results, in seconds."""
        return max(self.results)

    @property
    def std(self) -> float:
        """Population standard deviation of the results (numpy's default), in seconds."""
        return statistics.pstdev(self.results)

    def __str__(self) -> str:
        heads = ("mean (ms)", "median (ms)", "max (ms)", "min (ms)", "std (ms)")
        values = (self.mean, self.median, self.max, self.min, self.std)
        return "\n".join(
            (
                "Execution time summary:",
                " ".join(f"{head:^12}" for head in heads).rstrip(),
                " ".join(f"{value * 1e3:^12.4f}" for value in values).rstrip(),
            )
        )


def time_calls(
    call: Callable[[], object],
    *,
    number: int,
    repeat: int,
    min_repeat_ms: float = 0,
    limit_zero_time_iterations: int = 100,
    cooldown_interval_ms: float = 0,
    repeats_to_cooldown: int = 1,
) -> BenchmarkResult:
    """Time a call.

    Parameters
    ----------
    call
        The function to time.
    number
        Calls per result, increased until they take `min_repeat_ms`.
    repeat
        Number of results.
    min_repeat_ms
        Shortest duration of one repeat, in milliseconds.
    limit_zero_time_iterations
        Stop growing `number` after this many attempts that took no measurable time.
    cooldown_interval_ms
        Pause in milliseconds after every `repeats_to_cooldown` repeats, for processors that throttle.
    repeats_to_cooldown
        Repeats between two pauses.

    Raises
    ------
    ValueError
        If `number`, `repeat` or `repeats_to_cooldown` is less than 1.
    """
    if number < 1 or repeat < 1 or repeats_to_cooldown < 1:
        raise ValueError(
            "expected number, repeat and repeats_to_cooldown of at least 1, "
            f"got {number}, {repeat} and {repeats_to_cooldown}"
        )
    call()
    results = []
    for index in range(repeat):
        zeros = 0
        while True:
            start = time.perf_counter()
            for _ in range(number):
                call()
            elapsed = time.perf_counter() - start
            zeros += elapsed == 0
            if elapsed * 1e3 >= min_repeat_ms or zeros >= limit_zero_time_iterations:
                break
            # Aim for the wanted duration, but grow at least by the golden ratio, as TVM does.
            wanted = min_repeat_ms * 1e-3 / elapsed * number if elapsed else 0
            number = int(max(wanted + 1, number * 1.618 + 1))
        results.append(elapsed / number)
        if cooldown_interval_ms and (index + 1) % repeats_to_cooldown == 0:
            time.sleep(cooldown_interval_ms * 1e-3)
    return BenchmarkResult(tuple(results))
