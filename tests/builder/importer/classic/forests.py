"""Random forests as arrays, walked one node at a time: the definition that kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.calls.trees import EQUAL, GREATER, LESS, MEMBER, NAN, Ensemble

PLAIN = (LESS | EQUAL,)
MODES = (LESS | EQUAL, LESS, GREATER | EQUAL, GREATER, EQUAL, LESS | GREATER | NAN)


@dataclass(frozen=True)
class Forest:
    """What to draw: sizes, and the tests that nodes have."""

    trees: int = 13
    depth: int = 4
    features: int = 5
    targets: int = 1
    tests: tuple[int, ...] = PLAIN
    missing: bool = False
    dtype: str = "float32"
    aggregate: str = "SUM"
    full: bool = True
    one_target: bool = False


def draw(forest: Forest, seed: int = 0) -> Ensemble:
    """Draw an ensemble; nodes of a tree are in random order."""
    random = np.random.default_rng(seed)
    nodes: list[list[Any]] = []
    values: list[np.ndarray] = []
    sets: list[int] = []

    def grow(depth: int, target: int) -> int:
        place = len(nodes)
        nodes.append([0, 0, place, place, 0.0, 0])
        if depth == 0 or (not forest.full and random.random() < 0.3):
            row = random.standard_normal(forest.targets)
            if forest.one_target:
                row[np.arange(forest.targets) != target] = 0
            nodes[place][5] = len(values)
            values.append(row)
            return place
        test = int(random.choice(forest.tests))
        feature = int(random.integers(forest.features))
        if test == MEMBER:
            nodes[place][5] = len(sets)
            words = random.integers(-(2**31), 2**31, int(random.integers(1, 3)))
            sets.extend([len(words), *words.tolist()])
        if forest.missing and random.random() < 0.5:
            test |= NAN
        true, false = grow(depth - 1, target), grow(depth - 1, target)
        # Few different thresholds, so that equality is not rare.
        nodes[place][:5] = [feature, test, true, false, random.integers(-8, 9) / 8]
        return place

    roots = [grow(forest.depth, int(random.integers(forest.targets))) for _ in range(forest.trees)]
    columns = list(zip(*nodes, strict=True))
    int32 = [np.array(column, np.int32) for column in (columns[0], columns[2], columns[3], columns[5])]
    return Ensemble(
        roots=np.array(roots, np.int32),
        feature=int32[0],
        tests=np.array(columns[1], np.uint8),
        true=int32[1],
        false=int32[2],
        threshold=np.array(columns[4], forest.dtype),
        row=int32[3],
        values=np.array(values, forest.dtype),
        sets=np.array(sets or [0], np.int32),
        aggregate=forest.aggregate,
    )


def samples(forest: Forest, count: int, seed: int = 0) -> np.ndarray:
    """Draw samples: often equal to a threshold, sometimes a category or missing."""
    random = np.random.default_rng(seed + 1)
    x = random.integers(-10, 11, (count, forest.features)) / 8
    category = random.random(x.shape) < 0.3
    x[category] = random.integers(-2, 70, int(category.sum()))
    if forest.missing or NAN in forest.tests:
        x[random.random(x.shape) < 0.2] = np.nan
        x[random.random(x.shape) < 0.05] = np.inf
        x[random.random(x.shape) < 0.05] = -np.inf
    return x.astype(forest.dtype)


def passes(ensemble: Ensemble, node: int, value: float) -> bool:
    """Whether a value passes a node's test."""
    test, threshold = int(ensemble.tests[node]), float(ensemble.threshold[node])
    if np.isnan(value):
        return bool(test & NAN)
    if test & MEMBER:
        start = int(ensemble.row[node])
        words = ensemble.sets[start + 1 : start + 1 + ensemble.sets[start]].view(np.uint32)
        if value < 0 or value >= 32 * len(words) or value != int(value):
            return False
        return bool(int(words[int(value) // 32]) >> (int(value) % 32) & 1)
    outcome = LESS if value < threshold else EQUAL if value == threshold else GREATER
    return bool(test & outcome)


def reference(ensemble: Ensemble, x: np.ndarray) -> np.ndarray:
    """What the leaves add up to, `[samples, targets]`, added in the order of the trees."""
    combine: Any = {"MIN": np.minimum, "MAX": np.maximum}.get(ensemble.aggregate, np.add)
    neutral = {"MIN": np.inf, "MAX": -np.inf}.get(ensemble.aggregate, 0.0)
    sums = np.full((len(x), ensemble.targets), neutral, ensemble.values.dtype)
    for row, sample in enumerate(x):
        for root in ensemble.roots:
            node = int(root)
            while ensemble.tests[node]:
                value = float(sample[ensemble.feature[node]])
                node = int((ensemble.true if passes(ensemble, node, value) else ensemble.false)[node])
            sums[row] = combine(sums[row], ensemble.values[ensemble.row[node]])
    return np.where(np.isinf(sums), 0, sums) if neutral else sums
