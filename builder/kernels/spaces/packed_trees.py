"""How the trees of an ensemble are arranged as the arrays that a kernel reads (`trees`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.calls.trees import EQUAL, GREATER, LESS, MEMBER, NAN, Ensemble

# Complete trees double with each level; beyond these limits, nodes need less memory.
_DEEPEST_COMPLETE: Final = 8
_LARGEST_GROWTH: Final = 4.0
# The tests of a node, above the bits of its feature's number.
TEST_SHIFT: Final = 24
FEATURE_MASK: Final = (1 << TEST_SHIFT) - 1


@dataclass(frozen=True, slots=True)
class Packed:
    """An ensemble as a kernel reads it.

    `trees`: how many there are, completed to whole groups of `group`.
    `group`: trees that are walked together.
    `targets`: numbers that the ensemble computes for a sample.
    `levels`: the depth of complete trees; for nodes, that of the deepest tree.
    `strict`: whether a test is true for smaller values only, not for equal ones.
    `missing`: whether some tests are true for missing values; they then read a copy of the sample's features
        in which missing values are negative infinity.
    `mixed`: whether tests differ in what makes them true; each node then has the bits of its own.
    `one_target`: whether all leaves of a tree speak of the same target.
    `aggregate`: `SUM`, `MIN` or `MAX`.
    `arrays`: the kernel's weights, in the order of its arguments.
    """

    trees: int
    group: int
    features: int
    targets: int
    levels: int
    complete: bool
    strict: bool
    missing: bool
    mixed: bool
    one_target: bool
    aggregate: str
    arrays: tuple[NDArray[Any], ...]


def pack(ensemble: Ensemble, features: int, group: int) -> Packed:
    """Arrange an ensemble for the kernel; `group` trees are walked together."""
    ensemble = _without_denormal(_without_greater(ensemble))
    tests = ensemble.tests[ensemble.tests != 0]
    kinds = {int(kind) for kind in np.unique(tests & ~np.uint8(NAN))}
    lowest = (ensemble.threshold == -np.inf) & ((ensemble.tests & NAN) != 0)
    mixed = not (kinds <= {LESS | EQUAL} or (kinds == {LESS} and not lowest.any()))
    strict = kinds == {LESS}
    missing = not mixed and bool((tests & NAN).any())
    levels = ensemble.depth()
    padded = ensemble.roots.size * 2.0**levels
    complete = (
        not mixed and levels <= _DEEPEST_COMPLETE and padded <= _LARGEST_GROWTH * ensemble.feature.size + 4096
    )
    ensemble = _whole_groups(ensemble, group)
    trees = ensemble.roots.size
    owner = _targets_of_trees(ensemble)
    feature = ensemble.feature + np.where((ensemble.tests & NAN) != 0, features if missing else 0, 0)
    values = ensemble.values
    if complete:
        arrays = _complete(ensemble, feature.astype(np.int32), levels, owner)
    else:
        words = ensemble.tests.astype(np.int64) << TEST_SHIFT if mixed else 0
        arrays = _nodes(ensemble, (feature | words).astype(np.int32), owner)
        if mixed:
            arrays = (*arrays, ensemble.sets)
    if owner is not None and values.shape[1] > 1:
        arrays = (*arrays, owner)
    aggregate = "SUM" if ensemble.aggregate == "AVERAGE" else ensemble.aggregate
    return Packed(
        trees, group, features, values.shape[1], levels, complete, strict, missing, mixed,
        owner is not None, aggregate, arrays,
    )  # fmt: skip


def _without_greater(ensemble: Ensemble) -> Ensemble:
    """Turn tests for greater values around: their complement, with the children exchanged."""
    turned = (ensemble.tests & GREATER) != 0
    if not turned.any():
        return ensemble
    tests = np.where(turned, ~ensemble.tests & (LESS | EQUAL | GREATER | NAN), ensemble.tests)
    true = np.where(turned, ensemble.false, ensemble.true)
    false = np.where(turned, ensemble.true, ensemble.false)
    return replace(ensemble, tests=tests.astype(np.uint8), true=true, false=false)


def _without_denormal(ensemble: Ensemble) -> Ensemble:
    """Move denormal thresholds, which kernels flush to zero, so that an input of 0 takes the same branch.

    No number is between a denormal threshold and its replacement but denormal ones, which are zeros here.
    """
    threshold = ensemble.threshold
    tiny = np.finfo(threshold.dtype).tiny
    outcomes = ensemble.tests & (LESS | EQUAL)
    below = (threshold < 0) & (threshold > -tiny) & (outcomes == (LESS | EQUAL))
    above = (threshold > 0) & (threshold < tiny) & (outcomes == LESS)
    return replace(ensemble, threshold=np.where(below, -tiny, np.where(above, tiny, threshold)))


def _whole_groups(ensemble: Ensemble, group: int) -> Ensemble:
    """Complete the last group with trees that change nothing: a leaf of zeros, or the last tree again."""
    lacking = -ensemble.roots.size % group
    if not lacking:
        return ensemble
    if ensemble.aggregate in ("MIN", "MAX"):
        roots = np.concatenate([ensemble.roots, np.repeat(ensemble.roots[-1:], lacking)])
        return replace(ensemble, roots=roots)
    leaf = np.array([ensemble.feature.size], np.int32)
    return replace(
        ensemble,
        roots=np.concatenate([ensemble.roots, np.repeat(leaf, lacking)]),
        feature=np.append(ensemble.feature, np.int32(0)),
        tests=np.append(ensemble.tests, np.uint8(0)),
        threshold=np.append(ensemble.threshold, ensemble.threshold.dtype.type(0)),
        row=np.append(ensemble.row, np.int32(len(ensemble.values))),
        values=np.concatenate([ensemble.values, np.zeros_like(ensemble.values[:1])]),
        true=np.concatenate([ensemble.true, leaf]),
        false=np.concatenate([ensemble.false, leaf]),
    )


@dataclass(frozen=True, slots=True)
class _Preorder:
    """The nodes of all trees, each tree's in preorder: the child `true` of a node is next.

    A node that several trees share is there several times.

    `node`, `tree`: the node at each place, and its tree.
    `false`: the place of the child `false`; a leaf's own.
    """

    node: NDArray[np.int64]
    tree: NDArray[np.int64]
    false: NDArray[np.int64]

    @classmethod
    def of(cls, ensemble: Ensemble) -> _Preorder:
        """Order an ensemble.

        Places follow from the sizes of the subtrees, which are summed level by level: a walk over single
        nodes would take minutes for millions of them.
        """
        parents: NDArray[np.int64] = ensemble.roots.astype(np.int64)
        levels: list[NDArray[np.int64]] = []
        inner: list[NDArray[np.int64]] = []
        while parents.size:
            levels.append(parents)
            inner.append(np.flatnonzero(ensemble.tests[parents] != 0))
            branches = parents[inner[-1]]
            children = np.stack([ensemble.true[branches], ensemble.false[branches]], 1)
            parents = children.reshape(-1).astype(np.int64)
        sizes = [np.ones(level.size, np.int64) for level in levels]
        for depth in range(len(levels) - 2, -1, -1):
            sizes[depth][inner[depth]] += sizes[depth + 1].reshape(-1, 2).sum(1)
        places = np.concatenate([[0], np.cumsum(sizes[0])[:-1]])
        trees = np.arange(len(ensemble.roots), dtype=np.int64)
        node = np.empty(int(sizes[0].sum()), np.int64)
        tree, false = np.empty_like(node), np.arange(node.size)
        for depth, level in enumerate(levels):
            node[places], tree[places] = level, trees
            if not inner[depth].size:
                break
            first = places[inner[depth]] + 1
            second = first + sizes[depth + 1].reshape(-1, 2)[:, 0]
            false[places[inner[depth]]] = second
            places = np.stack([first, second], 1).reshape(-1)
            trees = np.repeat(trees[inner[depth]], 2)
        return cls(node, tree, false)


def _targets_of_trees(ensemble: Ensemble) -> NDArray[np.int32] | None:
    """Return the target of each tree if all of its leaves speak of that one only, else None."""
    if ensemble.targets == 1:
        return np.zeros(ensemble.roots.size, np.int32)
    if ensemble.aggregate in ("MIN", "MAX"):
        return None
    ordered = _Preorder.of(ensemble)
    is_leaf = ensemble.tests[ordered.node] == 0
    rows = ensemble.row[ordered.node[is_leaf]]
    least = np.full(ensemble.roots.size, ensemble.targets - 1)
    most = np.zeros(ensemble.roots.size, np.int64)
    for target in range(ensemble.targets):
        speaks = ordered.tree[is_leaf][ensemble.values[rows, target] != 0]
        least[speaks] = np.minimum(least[speaks], target)
        most[speaks] = np.maximum(most[speaks], target)
    silent = (
        np.bincount(ordered.tree[is_leaf][(ensemble.values[rows] != 0).any(1)], minlength=least.size) == 0
    )
    least[silent] = most[silent] = 0
    return most.astype(np.int32) if (least == most).all() else None


def _complete(
    ensemble: Ensemble, feature: NDArray[np.int32], levels: int, owner: NDArray[np.int32] | None
) -> tuple[NDArray[Any], ...]:
    """Return features and thresholds, `[trees, tests]`, and leaves, `[trees, 2^levels]`.

    Tests are in breadth-first order. A leaf is its number if the tree speaks of one target, else its row of
    values, which follow.
    """
    at = ensemble.roots[:, None]
    features, thresholds = [], []
    for _ in range(levels):
        features.append(feature[at])
        thresholds.append(ensemble.threshold[at])
        at = np.stack([ensemble.true[at], ensemble.false[at]], 2).reshape(at.shape[0], -1)
    if not levels:  # an array has at least one element
        features.append(np.zeros_like(at, np.int32))
        thresholds.append(np.zeros_like(at, ensemble.threshold.dtype))
    tests = np.concatenate(features, 1), np.concatenate(thresholds, 1)
    rows = ensemble.row[at]
    if owner is not None:
        return (*tests, ensemble.values[rows, owner[:, None]])
    return (*tests, rows, ensemble.values)


def _nodes(
    ensemble: Ensemble, feature: NDArray[np.int32], owner: NDArray[np.int32] | None
) -> tuple[NDArray[Any], ...]:
    """Return the place of each root, the nodes, `[nodes, 4]`, thresholds if of float64, and leaves.

    A node is its feature and tests, its threshold's bits (a leaf's row, a set's place), and its children.
    """
    ordered = _Preorder.of(ensemble)
    node = ordered.node
    place = np.arange(node.size)
    tests = ensemble.tests[node]
    leaf = tests == 0
    rows = ensemble.row[node]
    threshold = ensemble.threshold[node]
    values = ensemble.values
    payload = rows
    if owner is not None:
        values = values[rows[leaf], owner[ordered.tree[leaf]]]
        payload = rows.copy()
        payload[leaf] = np.arange(values.size)
    double = threshold.dtype == np.float64
    if not double:
        compared = ~leaf & ((tests & MEMBER) == 0)
        payload = np.where(compared, threshold.astype(np.float32).view(np.int32), payload)
    true = np.where(leaf, place, place + 1)
    nodes = np.stack([feature[node], payload, true, ordered.false], 1).astype(np.int32)
    first = np.flatnonzero(np.diff(ordered.tree, prepend=-1)).astype(np.int32)
    return (first, nodes, *((threshold,) if double else ()), values)
