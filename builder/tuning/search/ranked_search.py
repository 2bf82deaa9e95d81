"""A search that ranks the whole design space with a model of the measured times.

Our design spaces are small enough to list, so no evolutionary search is needed. Gradient-boosted trees (Chen
and Guestrin, *XGBoost*, 2016) learn the time from the decisions; all remaining points are ranked by the
predicted time minus a share of its uncertainty.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from builder.kernels.design_space import Decisions, DesignSpace, Point
from builder.tuning.search.unvisited import Unvisited

TREES: Final = 40
DEPTH: Final = 4
RATE: Final = 0.25
MODELS: Final = 4  # each trained on its own sample; where they disagree, the prediction is uncertain
SAMPLE, COLUMNS = 0.8, 0.7
SHRINKING: Final = 0.1  # XGBoost's lambda; its default of 1 is for noisier data, and over-smooths so few
OPTIMISM: Final = 1.5  # standard deviations subtracted from the predicted cost
AT_RANDOM: Final = 8  # one point in eight is random: a model cannot learn what it never tries
CENTRES: Final = 3  # best points, whose neighbours make up half of the ranked points
LEAST: Final = 6  # with fewer measured points, a model is of no use
FAILED: Final = math.log(4.0)  # a point that does not run counts as four times as slow as the slowest

Floats = npt.NDArray[np.float32]


class RankedSearch:
    """Proposes the points with the best predicted times."""

    def __init__(self, unvisited: Unvisited, known: dict[Decisions, float | None], seed: int) -> None:
        self._unvisited, self._known, self._seed = unvisited, known, seed
        self._space = unvisited.space
        self._random = random.Random(seed)  # noqa: S311 - a search, not a secret

    def propose(self, count: int) -> list[Point]:
        """Return at most `count` points: the model's best (at first, best's neighbours), and random ones."""
        if sum(seconds is not None for seconds in self._known.values()) < LEAST:
            chosen = self._neighbours()[: (count + 1) // 2]
        else:
            chosen = self._ranked()
        points = self._unvisited.visit(chosen, count - max(1, count // AT_RANDOM) if count > 1 else 1)
        return points + self._unvisited.propose(count - len(points))

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Learn the seconds per call of proposed points; None for one that did not run."""
        self._known.update((p.decisions, s) for p, s in zip(points, seconds, strict=True))

    def _neighbours(self) -> list[Decisions]:
        """Return the points one decision away from the best known ones, or from the space's default."""
        ran = {d: s for d, s in self._known.items() if s is not None}
        centres = sorted(ran, key=lambda d: ran[d])[:CENTRES] or [self._space.default]
        found = {
            (*centre[:i], value, *centre[i + 1 :])
            for centre in centres
            for i, values in enumerate(self._space.values)
            for value in range(len(values))
        }
        return self._random.sample(sorted(found), len(found))

    def _ranked(self) -> list[Decisions]:
        """Return all remaining points, best prediction first; every second one is a neighbour of the best."""
        left = self._unvisited.left()
        if not left:
            return []
        predicted = _predictions(
            _features(self._space, list(self._known)),
            _costs(list(self._known.values())),
            _features(self._space, left),
            self._seed,
        )
        score = predicted.mean(axis=0) - OPTIMISM * predicted.std(axis=0)
        ranked = [left[i] for i in np.argsort(score, kind="stable")]
        near = set(self._neighbours())
        nearest = [d for d in ranked if d in near]
        return [d for pair in itertools.zip_longest(nearest, ranked) for d in pair if d is not None]


def _features(space: DesignSpace, points: Sequence[Decisions]) -> Floats:
    """Return a row per point: the logarithms of its values, and their pairwise sums (sizes of tiles)."""
    logs = [np.log2(np.maximum(np.array(values, np.float32), 0) + 1) for values in space.values]
    single = [logs[i][[p[i] for p in points]] for i in range(len(logs))]
    pairs = [single[i] + single[j] for i in range(len(single)) for j in range(i)]
    return np.stack([*single, *pairs], axis=1).astype(np.float32)


def _costs(seconds: Sequence[float | None]) -> Floats:
    """Return log(time / best time) of each point; one that failed costs `FAILED` more than the slowest."""
    ran = [s for s in seconds if s is not None]
    best, worst = min(ran), max(ran)
    return np.array([math.log((s or worst) / best) + (0 if s else FAILED) for s in seconds], np.float32)


def _predictions(known: Floats, costs: Floats, asked: Floats, seed: int) -> Floats:
    """Return the predicted cost, one row per model and one column per row of `asked`."""
    import xgboost

    data = xgboost.DMatrix(known, label=costs)
    rows = xgboost.DMatrix(asked)
    parameters: dict[str, Any] = {
        "max_depth": DEPTH, "eta": RATE, "subsample": SAMPLE, "colsample_bynode": COLUMNS,
        "lambda": SHRINKING, "min_child_weight": 0,
        "objective": "reg:squarederror", "nthread": 1, "verbosity": 0, "base_score": float(costs.mean()),
    }  # fmt: skip
    return np.stack(
        [
            xgboost.train({**parameters, "seed": seed + i}, data, num_boost_round=TREES).predict(rows)
            for i in range(MODELS)
        ]
    )
