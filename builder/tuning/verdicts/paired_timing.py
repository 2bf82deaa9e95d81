"""Tuned against untuned, on the same board, in turn: what the promise "never slower" rests on.

Times that are measured one after the other share whatever the board was doing at that moment, so each pair's
ratio is kept, and the median of the ratios is given with a bootstrap interval (Efron, *Bootstrap Methods*,
Annals of Statistics 7, 1979).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from builder.boards.interface import Boards
from builder.boards.measuring_process import BuiltKernel, RunnerOptions, check_plausible
from builder.bundles.package import Package
from builder.errors import BoardError
from builder.records.meta_json import Ratio

RESAMPLES: Final = 2000
CONFIDENCE: Final = 0.95
ATTEMPTS: Final = 3  # boards that may fail under one comparison
MODEL_TIMEOUT_S: Final = 900.0  # a large model on a small board: upload, two loads, and the pairs
LEAST_MODEL_S: Final = 0.02  # of one timing of a whole model: small ones are run several times


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Summarise pairs of (untuned, tuned) seconds.

    Raises
    ------
    ValueError
        If there are none.
    """
    if not pairs:
        raise ValueError("a ratio needs a pair")
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
    """Compare two kernels of the same arguments.

    Raises
    ------
    MeasureFault
        If no board could.
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
    boards: Boards, untuned: Package, tuned: Package, pairs: int, options: RunnerOptions, expected_s: float
) -> tuple[str, Ratio]:
    """Compare two compiled models; the board's name and the result.

    Parameters
    ----------
    boards
        Any of them does it.
    untuned, tuned
        The packages.
    pairs
        How many times each is timed.
    options
        Threads and cooldown.
    expected_s
        About what an inference takes, to time short ones several times over.

    Raises
    ------
    MeasureFault
        If no board could.
    """
    request = {
        "bundles": ["{path:untuned.bundle}", "{path:tuned.bundle}"],
        "pairs": pairs,
        "number": max(1, min(1000, round(LEAST_MODEL_S / max(expected_s, 1e-6)))),
        "threads": options.threads,
        "cooldown_ms": options.cooldown_ms,
    }
    files = [("untuned.bundle", _content(untuned)), ("tuned.bundle", _content(tuned))]
    for attempt in range(ATTEMPTS):
        try:
            with boards.session() as (name, process):
                answer, _ = process.call("compare", json.dumps(request), files, (), MODEL_TIMEOUT_S)
                measured = _pairs(answer)
                check_plausible([seconds for pair in measured for seconds in pair])
                return name, ratio_of(measured)
        except BoardError:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError  # the last attempt returned or raised


def _content(package: Package) -> bytes:
    with tempfile.TemporaryDirectory() as work:
        path = Path(work, "model.bundle")
        package.save(path)
        return path.read_bytes()


def _pairs(answer: str) -> list[tuple[float, float]]:
    try:
        return [(float(a), float(b)) for a, b in json.loads(answer)["pairs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise BoardError(f"expected pairs of times, got {answer[:80]!r}") from error


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
