"""Tuned against untuned, timed alternately on one board: the basis of the promise "never slower".

Two times measured right after each other are disturbed alike by whatever else the board is doing. So the
result is the median of the ratios of all pairs, with its bootstrap interval (Efron, *Bootstrap Methods*,
Annals of Statistics 7, 1979).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import numpy as np

from builder.boards.interface import Boards
from builder.boards.measuring_process import BuiltKernel, RunnerOptions, check_plausible
from builder.bundles.package import Package
from builder.errors import BoardError
from builder.records.meta_json import Ratio
from builder.tuning.context import TuningContext

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
ATTEMPTS: Final = 3  # boards that may fail during one comparison
MODEL_TIMEOUT_S: Final = 900.0  # a large model on a small board: upload, two loads, and the pairs
NARROW: Final = 0.02  # the interval of a model's speed-up is narrow if it is at most this wide
MAX_ROUNDS: Final = 3  # each has twice the pairs of the one before: seven times the pairs in all
LEAST_MODEL_S: Final = 0.02  # shortest time of one measurement: small models run several times in it


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Return medians, speed-up and interval of pairs of (untuned, tuned) seconds."""
    if not pairs:
        raise ValueError("expected at least one pair of times, got none")
    times = np.array(pairs, dtype=np.float64)
    ratios = times[:, 0] / times[:, 1]
    generator = np.random.default_rng(0)
    samples = np.median(generator.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples, [edge, 1 - edge])
    untuned, tuned = np.median(times, axis=0) * 1e6
    return Ratio(
        _rounded(untuned),
        _rounded(tuned),
        _rounded(np.median(ratios)),
        _rounded(low),
        _rounded(high),
        len(pairs),
    )


def compare_kernels(
    boards: Boards, untuned: BuiltKernel, tuned: BuiltKernel, pairs: int, options: RunnerOptions
) -> Ratio:
    """Compare two kernels with the same arguments on any board.

    Raises `MeasureFault` if a kernel fails, or three boards fail one after the other.
    """
    for attempt in range(ATTEMPTS):
        try:
            with boards.session() as (_, process):
                return ratio_of(process.compare(untuned, tuned, pairs, options))
        except BoardError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError  # the last attempt returned or raised


def compare_models(
    context: TuningContext, untuned: Package, tuned: Package, expected_s: float
) -> tuple[str, Ratio]:
    """Compare two compiled models on any board; return the board's name and the result.

    On a busy board, the interval is wide: then the comparison is continued with more pairs.

    `context`: provides the boards, the number of pairs, the threads and the cooldown.
    `expected_s`: approximate duration of an inference in seconds: a short one is repeated in each
        measurement.
    Raises `MeasureFault` if a model fails, or three boards fail one after the other.
    """
    request = {
        "bundles": ["{path:untuned.bundle}", "{path:tuned.bundle}"],
        "number": max(1, min(1000, round(LEAST_MODEL_S / max(expected_s, 1e-6)))),
        "threads": context.runner.threads,
        "cooldown_ms": context.runner.cooldown_ms,
    }
    files = [("untuned.bundle", untuned.to_bytes()), ("tuned.bundle", tuned.to_bytes())]
    for attempt in range(ATTEMPTS):
        try:
            with context.boards.session() as (name, process):
                measured: list[tuple[float, float]] = []
                for round_ in range(MAX_ROUNDS):
                    asked = json.dumps({**request, "pairs": context.options.pairs << round_})
                    answer, _ = process.call("compare", asked, files, (), MODEL_TIMEOUT_S)
                    measured += _pairs(answer)
                    check_plausible([seconds for pair in measured for seconds in pair])
                    ratio = ratio_of(measured)
                    if ratio.high - ratio.low <= NARROW:
                        break
                return name, ratio
        except BoardError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError  # the last attempt returned or raised


def _pairs(answer: str) -> list[tuple[float, float]]:
    try:
        return [(float(a), float(b)) for a, b in json.loads(answer)["pairs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise BoardError(f"expected pairs of times, got {answer[:80]!r}") from error


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
