"""A tree ensemble as arrays, read from ONNX's three operators for it.

Promises a forest: every child exists, every node has one parent or is a root, and every leaf has a row of
values. So a walk from a root ends at a leaf, whatever the file said. Leaves to `ensemble_call` how
the sums become labels and probabilities, and to `builder.kernels.spaces.trees` how the trees are walked.

Source: ONNX operator specification, ai.onnx.ml, TreeEnsembleClassifier-3, TreeEnsembleRegressor-3 and
TreeEnsemble-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from builder.calls.trees import AGGREGATES, EQUAL, GREATER, LESS, MEMBER, NAN, Ensemble, Floats, Ints

# What makes a test true, by mode. Complementing a set exchanges the children.
MODES: Final[Mapping[bytes, int]] = {
    b"BRANCH_LEQ": LESS | EQUAL,
    b"BRANCH_LT": LESS,
    b"BRANCH_GTE": GREATER | EQUAL,
    b"BRANCH_GT": GREATER,
    b"BRANCH_EQ": EQUAL,
    b"BRANCH_NEQ": LESS | GREATER | NAN,
    b"LEAF": 0,
}
# The numbers of TreeEnsemble-5.
_MODE_NUMBERS: Final = (*list(MODES.values())[:6], MEMBER)
MEMBER_NUMBER: Final = 6
TRANSFORMS: Final = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
OPERATORS: Final = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})

# Numbers in leaves. A device holds them in memory, twice while a bundle is loaded.
MAX_LEAF_VALUES: Final = 1 << 26
# A feature's number is stored with the bits of its test.
MAX_FEATURES: Final = 1 << 20
# The largest category of a set that is stored as bits; others are tested one by one.
MAX_CATEGORY: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class ClassWeights:
    """Which classes the leaves of a classifier speak of.

    `classes`: the classes that any leaf has a weight for.
    `always`: the classes that every sample gets a weight for: all leaves of some tree have one.
    `nonnegative`: whether no weight is negative.
    `present`: 1 where a leaf has a weight for a class, even one of 0; of the shape of the ensemble's values.
    """

    classes: frozenset[int]
    always: frozenset[int]
    nonnegative: bool
    present: Floats


def attribute(node: onnx.NodeProto, name: str) -> onnx.AttributeProto | None:
    """Return an attribute of a node; `attributes` would copy the arrays of all of them."""
    return next((found for found in node.attribute if found.name == name), None)


def ints(node: onnx.NodeProto, name: str) -> NDArray[np.int64]:
    """Return an attribute that is a list of integers, or a tensor of them; empty if it is absent."""
    found = attribute(node, name)
    if found is None:
        return np.zeros(0, np.int64)
    if found.type == onnx.AttributeProto.TENSOR:
        return np.asarray(numpy_helper.to_array(found.t)).reshape(-1).astype(np.int64)
    return np.array(found.ints, np.int64)


def floats(node: onnx.NodeProto, name: str) -> Floats:
    """Return `name` as float32, or its form `name_as_tensor` as float32 or float64; empty if both are absent.

    Raises
    ------
    ValueError
        If the tensor holds something else.
    """
    tensor = attribute(node, f"{name}_as_tensor") or attribute(node, name)
    if tensor is None:
        return np.zeros(0, np.float32)
    if tensor.type != onnx.AttributeProto.TENSOR:
        return np.array(tensor.floats, np.float32)
    values = np.asarray(numpy_helper.to_array(tensor.t)).reshape(-1)
    if values.dtype not in (np.float32, np.float64):
        raise ValueError(f"expected {name} to be float32 or float64, got {values.dtype}")
    return values


def text(node: onnx.NodeProto, name: str, default: str) -> str:
    """Return an attribute that is a string."""
    found = attribute(node, name)
    return default if found is None else found.s.decode(errors="replace")


def target_count(node: onnx.NodeProto) -> int:
    """Return how many numbers a node computes for a sample, 0 if it does not say."""
    if node.op_type == "TreeEnsembleClassifier":
        names = attribute(node, "classlabels_strings")
        return len(names.strings) if names and names.strings else ints(node, "classlabels_int64s").size
    found = attribute(node, "n_targets")
    return int(found.i) if found is not None else 0


def read_ensemble(node: onnx.NodeProto, dtype: np.dtype[Any], features: int) -> Ensemble:
    """Read the trees of a node.

    `node`: a node with one of `OPERATORS`.
    """
    targets = target_count(node)
    if targets < 1:
        raise ValueError(f"expected at least one target or class, got {targets}")
    read = _read_newest if node.op_type == "TreeEnsemble" else _read_older
    ensemble = read(node, targets, np.dtype(np.float64 if dtype == np.float64 else np.float32))
    _check(ensemble, features, newest=node.op_type == "TreeEnsemble")
    return ensemble


def read_class_weights(node: onnx.NodeProto, ensemble: Ensemble) -> ClassWeights:
    """Return which classes the leaves of a TreeEnsembleClassifier speak of."""
    ids, weights = ints(node, "class_ids"), floats(node, "class_weights")
    classes = frozenset(int(value) for value in np.unique(ids))
    trees, inside = ints(node, "nodes_treeids"), ints(node, "nodes_nodeids")
    keys = _keys(trees, inside)
    order = np.argsort(keys, kind="stable")
    leaves = order[
        np.searchsorted(keys[order], _keys(ints(node, "class_treeids"), ints(node, "class_nodeids")))
    ]
    is_leaf = ensemble.tests == 0
    always = set()
    for one in classes:
        has = np.zeros(trees.size, bool)
        has[leaves[ids == one]] = True
        lacking = np.unique(trees[is_leaf & ~has])
        if np.setdiff1d(trees, lacking).size:
            always.add(one)
    present = np.zeros_like(ensemble.values)
    present[ensemble.row[leaves], ids] = 1
    return ClassWeights(classes, frozenset(always), bool(np.all(weights >= 0)), present)


def _read_older(node: onnx.NodeProto, targets: int, dtype: np.dtype[Any]) -> Ensemble:
    """Read a TreeEnsembleClassifier or TreeEnsembleRegressor."""
    kind = "class" if node.op_type == "TreeEnsembleClassifier" else "target"
    trees, inside = ints(node, "nodes_treeids"), ints(node, "nodes_nodeids")
    count = trees.size
    found = attribute(node, "nodes_modes")
    modes = list(found.strings) if found is not None else []
    columns = {name: ints(node, f"nodes_{name}") for name in ("featureids", "truenodeids", "falsenodeids")}
    threshold = floats(node, "nodes_values")
    _same_length(count, {"nodes_nodeids": inside, "nodes_values": threshold, "nodes_modes": modes, **columns})
    unknown = set(modes) - set(MODES)
    if unknown:
        raise ValueError(
            f"expected a mode such as BRANCH_LEQ, got {min(unknown).decode(errors='replace'):.40}"
        )
    tests = np.fromiter(map(MODES.__getitem__, modes), np.uint8, count)
    tests |= _missing(node, count, tests)
    keys = _keys(trees, inside)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    if count == 0 or (ordered[1:] == ordered[:-1]).any():
        raise ValueError("expected nodes with different ids")
    own = np.arange(count, dtype=np.int32)
    branch = tests != 0
    children = []
    for name in ("truenodeids", "falsenodeids"):
        child = own.copy()
        child[branch] = _find(ordered, order, _keys(trees[branch], columns[name][branch]))
        children.append(child)
    roots = _roots(trees, own, branch, children)
    ids, weights = ints(node, f"{kind}_ids"), floats(node, f"{kind}_weights")
    places = ints(node, f"{kind}_treeids"), ints(node, f"{kind}_nodeids")
    _same_length(
        ids.size, {f"{kind}_weights": weights, f"{kind}_treeids": places[0], f"{kind}_nodeids": places[1]}
    )
    aggregate = text(node, "aggregate_function", "SUM") if kind == "target" else "SUM"
    leaves = _find(ordered, order, _keys(*places))
    if branch[leaves].any():
        raise ValueError("expected weights of leaves only")
    row, values = _leaf_values(leaves, ids, weights, ~branch, targets, aggregate, dtype)
    feature = np.where(branch, columns["featureids"], 0)
    return Ensemble(
        roots=roots,
        feature=_int32(feature),
        tests=tests,
        true=children[0],
        false=children[1],
        threshold=_as(threshold, dtype),
        row=row,
        values=values,
        sets=np.zeros(1, np.int32),
        aggregate=aggregate,
    )


def _read_newest(node: onnx.NodeProto, targets: int, dtype: np.dtype[Any]) -> Ensemble:
    """Read a TreeEnsemble, which numbers branches and leaves apart; leaves come after all branches here."""
    modes = ints(node, "nodes_modes")
    count = modes.size
    columns = {
        name: ints(node, f"nodes_{name}")
        for name in ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    }
    splits = floats(node, "nodes_splits")
    _same_length(count, {"nodes_splits": splits, **columns})
    if count == 0 or modes.min() < 0 or modes.max() >= len(_MODE_NUMBERS):
        raise ValueError("expected modes from 0 to 6")
    ids, weights = ints(node, "leaf_targetids"), floats(node, "leaf_weights")
    _same_length(ids.size, {"leaf_weights": weights})
    tests = np.array(_MODE_NUMBERS, np.uint8)[modes]
    tests |= _missing(node, count, tests)
    leaves = np.arange(count, count + ids.size, dtype=np.int64)
    children = []
    for side in ("true", "false"):
        child, is_leaf = columns[f"{side}nodeids"], columns[f"{side}leafs"] != 0
        limit = np.where(is_leaf, ids.size, count)
        if ((child < 0) | (child >= limit)).any():
            raise ValueError(f"expected nodes_{side}nodeids below the number of nodes or leaves")
        children.append(_int32(np.concatenate([np.where(is_leaf, child + count, child), leaves])))
    roots = ints(node, "tree_roots")
    if roots.size == 0 or roots.min() < 0 or roots.max() >= count:
        raise ValueError("expected tree_roots to name nodes")
    found = attribute(node, "aggregate_function")
    number = 1 if found is None else int(found.i)
    if not 0 <= number < len(AGGREGATES):
        raise ValueError(f"expected an aggregate function from 0 to 3, got {number}")
    is_leaf = np.arange(count + ids.size) >= count
    row, values = _leaf_values(leaves, ids, weights, is_leaf, targets, AGGREGATES[number], dtype)
    nothing = np.zeros(ids.size, np.int64)
    threshold = np.concatenate([_as(splits, dtype), np.zeros(ids.size, dtype)])
    ensemble = Ensemble(
        _int32(roots), _int32(np.concatenate([columns["featureids"], nothing])),
        np.concatenate([tests, nothing.astype(np.uint8)]), children[0], children[1], threshold, row, values,
        np.zeros(1, np.int32), AGGREGATES[number],
    )  # fmt: skip
    return _with_sets(ensemble, floats(node, "membership_values"))


def _with_sets(ensemble: Ensemble, listed: Floats) -> Ensemble:
    """Store the members of each test of membership, which are listed one after another, as bits."""
    nodes = np.flatnonzero(ensemble.tests & MEMBER)
    if not nodes.size:
        return ensemble
    ends = np.flatnonzero(np.isnan(listed))
    bounds = np.concatenate([[-1], ends, [listed.size]])
    if len(bounds) - 1 not in (nodes.size, nodes.size + 1):
        raise ValueError(f"expected {nodes.size} sets in membership_values, got {len(bounds) - 1}")
    words: list[int] = []
    row = ensemble.row.copy()
    for place, node in enumerate(nodes):
        members = listed[bounds[place] + 1 : bounds[place + 1]]
        if members.size and (
            members.min() < 0 or members.max() > MAX_CATEGORY or (members != np.floor(members)).any()
        ):
            raise ValueError(f"expected members from 0 to {MAX_CATEGORY} without fractions")
        bits = np.zeros(int(members.max()) // 32 + 1 if members.size else 1, np.uint32)
        for member in members.astype(np.int64):
            bits[member // 32] |= np.uint32(1 << (member % 32))
        row[node] = len(words)
        words += [bits.size, *bits.view(np.int32).tolist()]
    return replace(ensemble, row=row, sets=np.array(words, np.int32))


def _leaf_values(
    leaves: NDArray[np.int64], ids: NDArray[np.int64], weights: Floats, is_leaf: NDArray[np.bool_],
    targets: int, aggregate: str, dtype: np.dtype[Any],
) -> tuple[Ints, Floats]:  # fmt: skip
    """The row of each leaf, and the numbers of all rows."""
    if aggregate not in AGGREGATES:
        raise ValueError(f"expected an aggregate function such as SUM, got {aggregate:.40}")
    if ids.size and (ids.min() < 0 or ids.max() >= targets):
        raise ValueError(f"expected targets from 0 to {targets - 1}, got {ids.min()} to {ids.max()}")
    rows = int(is_leaf.sum())
    if rows * targets > MAX_LEAF_VALUES:
        raise ValueError(f"expected at most {MAX_LEAF_VALUES} numbers in leaves, got {rows} x {targets}")
    row = np.zeros(is_leaf.size, np.int32)
    row[is_leaf] = np.arange(rows, dtype=np.int32)
    absent = {"MIN": np.inf, "MAX": -np.inf}.get(aggregate, 0.0)
    values = np.full((rows, targets), absent, dtype)
    if absent:
        combine = np.minimum if aggregate == "MIN" else np.maximum
        combine.at(values, (row[leaves], ids), weights.astype(dtype))
    else:
        flat = row[leaves].astype(np.int64) * targets + ids
        if not np.bincount(flat, minlength=1).max(initial=0) > 1:
            values[row[leaves], ids] = weights
        else:
            np.add.at(values, (row[leaves], ids), weights.astype(dtype))
    return row, values


def _check(ensemble: Ensemble, features: int, *, newest: bool) -> None:
    if features > MAX_FEATURES:
        raise ValueError(f"expected at most {MAX_FEATURES} features, got {features}")
    feature = ensemble.feature
    if feature.min() < 0 or feature.max() >= features:
        raise ValueError(
            f"expected features from 0 to {features - 1}, got {feature.min()} to {feature.max()}"
        )
    if np.isnan(ensemble.threshold[(ensemble.tests & ~np.uint8(MEMBER | NAN)) != 0]).any():
        raise ValueError("expected numbers as thresholds, got NaN")
    # With one parent at most, and roots without any, no walk from a root comes to a node twice.
    branch = ensemble.tests != 0
    parents = np.bincount(ensemble.true[branch], minlength=branch.size)
    parents += np.bincount(ensemble.false[branch], minlength=branch.size)
    if (parents[branch] > 1).any() or parents[ensemble.roots].any():
        raise ValueError("expected trees, got nodes with two parents or a root with one")
    reached = ensemble.reached()
    if not newest and reached != branch.size:
        raise ValueError(f"expected each node below a root, got {branch.size - reached} others")


def _missing(node: onnx.NodeProto, count: int, tests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """NAN for the nodes whose true child takes missing values."""
    tracks = ints(node, "nodes_missing_value_tracks_true")
    if tracks.size == 0:
        return np.zeros(count, np.uint8)
    _same_length(count, {"nodes_missing_value_tracks_true": tracks})
    return np.where((tracks != 0) & (tests != 0), NAN, 0).astype(np.uint8)


def _roots(trees: NDArray[np.int64], own: Ints, branch: NDArray[np.bool_], children: Sequence[Ints]) -> Ints:
    """The only node of each tree that is no child, in the order in which the trees begin in the file."""
    parents = np.zeros(own.size, np.int64)
    for child in children:
        parents += np.bincount(child[branch], minlength=own.size)
    roots = own[parents == 0]
    _, first = np.unique(trees, return_index=True)
    if roots.size != first.size or np.unique(trees[roots]).size != roots.size:
        raise ValueError("expected one root in each tree, a node that is no other's child")
    at = dict(zip(trees[roots].tolist(), roots.tolist(), strict=True))
    return np.array([at[int(trees[place])] for place in np.sort(first)], np.int32)


def _keys(trees: NDArray[np.int64], inside: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for each node: its tree, and its id there."""
    for numbers in (trees, inside):
        if numbers.size and (numbers.min() < 0 or numbers.max() >= 1 << 31):
            raise ValueError("expected ids of trees and nodes from 0 to 2^31 - 1")
    return trees << 32 | inside


def _find(ordered: NDArray[np.int64], order: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
    places = np.minimum(np.searchsorted(ordered, keys), ordered.size - 1)
    if (ordered[places] != keys).any():
        raise ValueError("expected children and weights of nodes that exist")
    return order[places]


def _same_length(count: int, columns: Mapping[str, Any]) -> None:
    for name, values in columns.items():
        if len(values) != count:
            raise ValueError(f"expected {count} numbers in {name}, got {len(values)}")


def _int32(values: NDArray[np.int64]) -> Ints:
    if values.size and (values.min() < 0 or values.max() >= 1 << 31):
        raise ValueError("expected numbers from 0 to 2^31 - 1")
    return values.astype(np.int32)


def _as(values: Floats, dtype: np.dtype[Any]) -> Floats:
    """Thresholds in the type of the comparison; rounding them would move a branch."""
    if values.dtype == np.float64 and dtype == np.float32:
        raise ValueError("expected thresholds of float32, because the input is: cast the input to float64")
    return values.astype(dtype)


def make_attributes(ensemble: Mapping[str, Any]) -> list[onnx.AttributeProto]:
    """Return attributes of a node; NumPy arrays of floats and bytes become tensors."""
    made = []
    for name, value in ensemble.items():
        is_array = isinstance(value, np.ndarray)
        if is_array and value.dtype.kind in "fu":
            made.append(helper.make_attribute(name, numpy_helper.from_array(value)))
        else:
            made.append(helper.make_attribute(name, value.tolist() if is_array else value))
    return made
