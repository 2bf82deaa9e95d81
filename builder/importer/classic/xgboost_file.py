"""Read a model that XGBoost saved, as JSON (`.json`) or as UBJSON (`.ubj`), without XGBoost.

Trees (`gbtree`, `dart`) with one value in a leaf, and linear boosters (`gblinear`); vector leaves are refused
by name.
Written by XGBoost 1.6 to 3.2.

Source: XGBoost's documentation, "Introduction to Model IO", and the schema that it links.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.errors import ModelError, lines_of
from builder.importer.classic import ubjson
from builder.importer.classic.boosted import (
    LT,
    MAX_CLASSES,
    MAX_TREES,
    SAVE_AGAIN,
    Boosted,
    Link,
    Tree,
    check_tree,
)
from builder.importer.classic.ensemble import MEMBER_NUMBER as MEMBER
from builder.importer.classic.saved_file import read_bounded

# Objective -> how scores become an answer, whether that is a class, and how the base score is stored.
_OBJECTIVES: Final[Mapping[str, tuple[Link, bool, str]]] = {
    "binary:hinge": ("positive", False, "identity"),
    "binary:logistic": ("sigmoid", True, "sigmoid"),
    "binary:logitraw": ("identity", False, "identity"),
    "count:poisson": ("exp", False, "exp"),
    "multi:softmax": ("softmax", True, "identity"),
    "multi:softprob": ("softmax", True, "identity"),
    "rank:map": ("identity", False, "identity"),
    "rank:ndcg": ("identity", False, "identity"),
    "rank:pairwise": ("identity", False, "identity"),
    "reg:absoluteerror": ("identity", False, "identity"),
    "reg:gamma": ("exp", False, "exp"),
    "reg:linear": ("identity", False, "identity"),
    "reg:logistic": ("sigmoid", False, "sigmoid"),
    "reg:pseudohubererror": ("identity", False, "identity"),
    "reg:quantileerror": ("identity", False, "identity"),
    "reg:squarederror": ("identity", False, "identity"),
    "reg:squaredlogerror": ("identity", False, "identity"),
    "reg:tweedie": ("exp", False, "exp"),
    "survival:aft": ("exp", False, "exp"),
    "survival:cox": ("exp", False, "exp"),
}
# Python's values take up to thirty times the text that they are read from; these keep that below 2 GiB.
MAX_JSON_BYTES: Final = 192 << 20
MAX_UBJ_BYTES: Final = 1 << 30
_MOST: Final = {b"{": 1 << 18, b"[": 1 << 22, b'"': 1 << 23}


def read_xgboost(path: Path, progress: Callable[[str], None]) -> tuple[Boosted, str]:
    """Read a model.

    `path`: the file; its suffix says which of the two forms it has.
    `progress`: called with a line about what is left out.
    Raises `ModelError` if the file cannot be read, is no such model, or has something that cannot be
        imported.
    """
    is_json = path.suffix.lower() == ".json"
    raw, digest = read_bounded(path, MAX_JSON_BYTES if is_json else MAX_UBJ_BYTES)
    try:
        document = _parse_json(raw) if is_json else ubjson.loads(raw)
        del raw
        return _model(document, str(path), progress), digest
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(
            f"expected a model saved by XGBoost, got a file without {error!s:.80}: {path}",
            hint="save it with booster.save_model('MODEL.ubj')",
        ) from error
    except (ValueError, OverflowError, RecursionError) as error:
        raise ModelError(
            f"expected a model saved by XGBoost, got {path}: {lines_of(error)[0]:.160}",
            hint="save it with booster.save_model('MODEL.ubj')",
        ) from error


def _parse_json(raw: bytes) -> Any:  # noqa: ANN401 - as json.loads
    for mark, most in _MOST.items():
        if raw.count(mark) > most:
            raise ValueError(f"more than {most} times {mark.decode()}")
    return json.loads(raw)


def _model(document: Mapping[str, Any], where: str, progress: Callable[[str], None]) -> Boosted:
    learner = document["learner"]
    objective = str(learner["objective"]["name"])
    if objective not in _OBJECTIVES:
        raise ModelError(
            f"{where}: expected an objective such as binary:logistic, got {objective!r:.60}",
            hint="export the model to ONNX with onnxmltools",
        )
    link, classifier, stored = _OBJECTIVES[objective]
    parameters = learner["learner_model_param"]
    classes = max(1, int(parameters["num_class"]), int(parameters.get("num_target", 1)))
    if classes > MAX_CLASSES:
        raise ModelError(
            f"{where}: expected at most {MAX_CLASSES} classes, got {classes}",
            hint="train it with fewer classes, or merge rare ones",
        )
    booster = learner["gradient_booster"]
    base, names = _base(parameters["base_score"], stored, classes), _names(learner, parameters)
    if booster["name"] == "gblinear":
        factors = _factors(booster["model"]["weights"], int(parameters["num_feature"]), classes)
        base = base + factors[-1]
        return Boosted(
            len(factors) - 1, (), base, link, classifier=classifier, names=names, linear=factors[:-1]
        )
    weights = None
    if booster["name"] == "dart":
        weights = np.asarray(booster["weight_drop"], np.float32)
        booster = booster["gbtree"]
    elif booster["name"] != "gbtree":
        raise ModelError(
            f"{where}: expected a booster of trees or gblinear, got {booster['name']!r:.40}",
            hint="train it with booster='gbtree', 'dart' or 'gblinear'",
        )
    model = booster["model"]
    features, groups, trees = int(parameters["num_feature"]), model["tree_info"], model["trees"]
    saved = int(model.get("gbtree_model_param", {}).get("num_trees", len(trees)))
    if saved != len(trees):
        raise ModelError(
            f"{where}: expected {saved} trees, as the file says, got {len(trees)}", hint=SAVE_AGAIN
        )
    if len(trees) > MAX_TREES or len(groups) != len(trees):
        raise ModelError(
            f"{where}: expected a target for each tree, got {len(groups)} for {len(trees)}", hint=SAVE_AGAIN
        )
    if not trees and stored != "identity":
        raise ModelError(
            f"{where}: expected trees of {objective}, got none",
            hint="train it for at least one round: without trees, XGBoost answers differently",
        )
    if weights is not None and weights.size != len(trees):
        raise ModelError(
            f"{where}: expected a weight for each tree, got {weights.size} for {len(trees)}", hint=SAVE_AGAIN
        )
    count = _best(learner, model, len(trees), progress)
    found = []
    for index in range(count):
        scale = np.float32(1) if weights is None else weights[index]
        tree = _tree(trees[index], int(groups[index]), scale, f"{where}: tree {index}")
        check_tree(tree, features, f"{where}: tree {index}")
        if not 0 <= tree.target < classes:
            raise ModelError(
                f"{where}: tree {index}: expected a target below {classes}, got {tree.target}",
                hint=SAVE_AGAIN,
            )
        found.append(tree)
    return Boosted(features, found, base, link, classifier=classifier, names=names)


def _names(learner: Mapping[str, Any], parameters: Mapping[str, Any]) -> tuple[str, ...]:
    names = tuple(str(name) for name in learner.get("feature_names", ()))
    return names if len(names) == int(parameters["num_feature"]) else ()


def _factors(values: Any, features: int, targets: int) -> NDArray[np.float32]:  # noqa: ANN401
    """Return the factors of a linear booster, `[features + 1, targets]`, the last row without a feature."""
    found = _numbers(values, np.float32)
    if features < 1 or found.size != (features + 1) * targets or not np.isfinite(found).all():
        raise ValueError(f"expected {(features + 1) * targets} finite weights, got {found.size}")
    return np.asarray(found.reshape(features + 1, targets), np.float32)


def _best(
    learner: Mapping[str, Any], model: Mapping[str, Any], trees: int, progress: Callable[[str], None]
) -> int:
    """How many trees XGBoost's estimators use: those up to the best round, if training stopped early."""
    best = learner.get("attributes", {}).get("best_iteration")
    ends = model.get("iteration_indptr")
    if best is None or ends is None or not 0 <= int(best) + 1 < len(ends):
        return trees
    count = int(ends[int(best) + 1])
    if not 0 < count <= trees:
        raise ValueError(f"expected 1 to {trees} trees up to the best iteration, got {count}")
    if count < trees:
        progress(f"the trees up to the best iteration, {int(best)}, are used: {count} of {trees}")
    return count


def _tree(tree: Mapping[str, Any], target: int, scale: np.float32, where: str) -> Tree:
    if int(tree["tree_param"].get("size_leaf_vector", 1)) > 1:
        raise ModelError(
            f"{where}: expected one value in a leaf, got a vector",
            hint="train with multi_strategy='one_output_per_tree'",
        )
    left, right = _numbers(tree["left_children"], np.int64), _numbers(tree["right_children"], np.int64)
    condition = _numbers(tree["split_conditions"], np.float32)
    columns = {
        "right_children": right,
        "split_conditions": condition,
        "split_indices": (feature := _numbers(tree["split_indices"], np.int64)),
        "default_left": (default_left := _numbers(tree["default_left"], np.int64)),
    }
    for name, column in columns.items():
        if column.size != left.size:
            raise ModelError(
                f"{where}: expected {left.size} numbers in {name}, got {column.size}", hint=SAVE_AGAIN
            )
    kinds = _numbers(tree.get("split_type", np.zeros(left.size)), np.int64)
    is_leaf = left == -1
    if not left.size or kinds.size != left.size or (is_leaf != (right == -1)).any():
        raise ModelError(f"{where}: expected nodes with two children or none", hint=SAVE_AGAIN)
    branches = np.flatnonzero(~is_leaf)
    number = np.empty(left.size, np.int64)
    number[branches] = np.arange(branches.size)
    number[is_leaf] = -1 - np.arange(left.size - branches.size)
    for child in (left[branches], right[branches]):
        if child.size and (child.min() <= 0 or child.max() >= left.size):
            raise ModelError(f"{where}: expected children that are nodes of the tree", hint=SAVE_AGAIN)
    categorical = kinds[branches] == 1
    members = _members(tree, branches[categorical], where) if categorical.any() else ()
    lefts, rights = number[left[branches]], number[right[branches]]
    goes_left = default_left[branches] != 0
    # A category in the set goes to the right, a number below the threshold to the left.
    return Tree(
        feature[branches],
        np.where(categorical, np.float32(0), condition[branches]),
        np.where(categorical, MEMBER, LT).astype(np.uint8),
        np.where(categorical, ~goes_left, goes_left),
        np.where(categorical, rights, lefts),
        np.where(categorical, lefts, rights),
        members,
        condition[is_leaf] * scale,
        target,
    )


def _members(tree: Mapping[str, Any], nodes: NDArray[np.int64], where: str) -> Sequence[NDArray[np.int64]]:
    """The categories of each node's set."""
    listed = _numbers(tree["categories"], np.int64)
    owners = _numbers(tree["categories_nodes"], np.int64)
    starts = _numbers(tree["categories_segments"], np.int64)
    sizes = _numbers(tree["categories_sizes"], np.int64)
    if not owners.size == starts.size == sizes.size or set(nodes.tolist()) - set(owners.tolist()):
        raise ModelError(f"{where}: expected the categories of each categorical split", hint=SAVE_AGAIN)
    at = {int(owner): place for place, owner in enumerate(owners)}
    found = []
    for node in nodes:
        start, size = int(starts[at[int(node)]]), int(sizes[at[int(node)]])
        if not 0 <= start <= start + size <= listed.size:
            raise ModelError(f"{where}: expected categories that are listed", hint=SAVE_AGAIN)
        found.append(listed[start : start + size])
    return found


def _base(stored: str | Sequence[float], link: str, classes: int) -> NDArray[np.float32]:
    """The base score of each target, before the link. Up to XGBoost 3.0 it is one number for all."""
    text = str(stored).strip("[]")
    values = [float(part) for part in text.split(",")]
    if len(values) not in (1, classes):
        raise ValueError(f"expected {classes} base scores, got {len(values)}")
    if link == "sigmoid":
        if not all(0 < value < 1 for value in values):
            raise ValueError(f"expected base scores between 0 and 1, got {text:.40}")
        values = [-math.log(1 / value - 1) for value in values]
    elif link == "exp":
        if not all(value > 0 for value in values):
            raise ValueError(f"expected base scores above 0, got {text:.40}")
        values = [math.log(value) for value in values]
    return np.array(values * (classes // len(values)), np.float32)


def _numbers(values: Any, dtype: type[np.generic]) -> NDArray[Any]:  # noqa: ANN401
    found = np.asarray(values)
    if found.ndim != 1 or (found.dtype.kind not in "biuf" and found.size):
        raise ValueError("expected lists of numbers")
    if np.dtype(dtype).kind == "i" and found.dtype.kind == "f":
        if found.size and not np.array_equal(found, np.floor(found)):
            raise ValueError("expected whole numbers")
        if found.size and np.abs(found).max() > 1 << 53:
            raise ValueError("expected numbers below 2^53")
    return found.astype(dtype)
