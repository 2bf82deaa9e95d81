"""Boosted trees and linear models as XGBoost and LightGBM save them, written as an ONNX model.

Both readers end here, so their files go the way of every other model: one importer, one kernel, and ONNX
Runtime as the reference. The model takes `features`, `[N, features]`, float32. A classifier gives `label`,
`[N]`, int64, and `probabilities`, `[N, classes]`; any other model gives `prediction`, `[N, targets]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer.classic.ensemble import MAX_CATEGORY, MAX_FEATURES, make_attributes
from builder.importer.classic.ensemble import MEMBER_NUMBER as MEMBER

SAVE_AGAIN: Final = "the file is damaged: save it again with booster.save_model"

# ONNX's numbers of the modes of a test.
LEQ: Final = 0
LT: Final = 1
# How scores become an answer.
Link = Literal["identity", "sigmoid", "exp", "softmax", "sigmoids", "positive", "softplus", "square"]

MAX_TREES: Final = 1 << 20
MAX_CLASSES: Final = 1 << 12
# The name of the input with all features.
FEATURES: Final = "features"
_OPSET: Final = 18
_IR: Final = 10


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of a saved model.

    `feature`, `threshold`, `mode`, `missing`: for each branch: the feature, what it is compared with
        (float32), how, and whether missing values go to the child `true`.
    `true`, `false`: for each branch its children: a branch's number, or -1 - n for leaf n.
    `members`: for each branch with the mode `MEMBER`, in their order, the categories of its set.
    `leaves`: the leaves' values.
    `target`: which score the leaves add to.
    """

    feature: NDArray[np.int64]
    threshold: NDArray[np.float32]
    mode: NDArray[np.uint8]
    missing: NDArray[np.bool_]
    true: NDArray[np.int64]
    false: NDArray[np.int64]
    members: Sequence[NDArray[np.int64]]
    leaves: NDArray[np.float32]
    target: int


@dataclass(frozen=True, slots=True)
class Boosted:
    """A saved model.

    `trees`: the trees, in the order in which they are added.
    `base`: what each score begins with, `[targets]`.
    `scale`: what a score is multiplied by before the link.
    `average`: whether scores are means over rounds instead of sums.
    `classifier`: whether the answer is a label and probabilities.
    `names`: names of the features; none if the file has none of the user's.
    `linear`: instead of trees, what each feature is multiplied by, `[features, targets]`; a missing value
        counts as 0.
    """

    features: int
    trees: Sequence[Tree]
    base: NDArray[np.float32]
    link: Link
    scale: float = 1.0
    average: bool = False
    classifier: bool = False
    names: Sequence[str] = ()
    linear: NDArray[np.float32] | None = None


_NOTHING: Final = Tree(
    feature=np.zeros(0, np.int64),
    threshold=np.zeros(0, np.float32),
    mode=np.zeros(0, np.uint8),
    missing=np.zeros(0, bool),
    true=np.zeros(0, np.int64),
    false=np.zeros(0, np.int64),
    members=(),
    leaves=np.zeros(1, np.float32),
    target=0,
)


def to_onnx(model: Boosted, name: str) -> onnx.ModelProto:
    """Write a saved model as an ONNX model.

    Raises `ModelError` if the model has no features, or is larger than `MAX_TREES`, `MAX_FEATURES` or
        `MAX_CLASSES`.
    """
    if not model.trees:  # trained for no rounds: every score is the base score
        model = replace(model, trees=[_NOTHING])
    targets = model.base.size
    for what, count, limit in (
        ("trees", len(model.trees), MAX_TREES),
        ("features", model.features, MAX_FEATURES),
        ("targets", targets, MAX_CLASSES),
    ):
        if not 1 <= count <= limit:
            raise ModelError(f"expected 1 to {limit} {what}, got {count}", hint="train it with fewer of them")
    graph = _Graph()
    scores = graph.trees(model) if model.linear is None else graph.product(model.linear)
    if model.average:
        rounds = max(1, len(model.trees) // targets)
        scores = graph.op("Div", scores, graph.constant(np.float32(rounds)))
    if model.base.any():
        scores = graph.op("Add", scores, graph.constant(model.base))
    if model.scale != 1.0:
        scores = graph.op("Mul", scores, graph.constant(np.float32(model.scale)))
    outputs = graph.classify(scores, model) if model.classifier else graph.answer(scores, model)
    inputs = [helper.make_tensor_value_info(FEATURES, TensorProto.FLOAT, ["N", model.features])]
    proto = helper.make_graph(graph.nodes, name, inputs, outputs, initializer=graph.weights)
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("ai.onnx.ml", 5)]
    return helper.make_model(proto, opset_imports=opsets, ir_version=_IR)


class _Graph:
    """Nodes and weights of the model, in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, operator: str, *inputs: str, to: str = "", **attributes: Any) -> str:  # noqa: ANN401
        output = to or f"{operator.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [output], name=output, **attributes))
        return output

    def constant(self, value: Any) -> str:  # noqa: ANN401
        name = f"constant{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def cast(self, x: str, elem_type: int, to: str) -> str:
        self.nodes.append(helper.make_node("Cast", [x], [to], name=to, to=elem_type))
        return to

    def trees(self, model: Boosted) -> str:
        samples = self.floor_categories(FEATURES, model)
        tree = helper.make_node("TreeEnsemble", [samples], ["sums"], name="trees", domain="ai.onnx.ml")
        tree.attribute.extend(make_attributes(_attributes(model)))
        self.nodes.append(tree)
        return "sums"

    def product(self, weights: NDArray[np.float32]) -> str:
        missing = self.op("IsNaN", FEATURES)
        present = self.op("Where", missing, self.constant(np.float32(0)), FEATURES)
        return self.op("MatMul", present, self.constant(weights))

    def floor_categories(self, samples: str, model: Boosted) -> str:
        """Cut the fractions of categorical features off: both libraries take 3.7 for the category 3."""
        is_category = np.zeros(model.features, bool)
        for tree in model.trees:
            is_category[tree.feature[tree.mode == MEMBER]] = True
        if not is_category.any():
            return samples
        floor = self.op("Floor", samples)
        return self.op("Where", self.constant(is_category), floor, samples)

    def classify(self, scores: str, model: Boosted) -> list[onnx.ValueInfoProto]:
        classes = model.base.size
        if classes == 1:
            second = self.op("Sigmoid", scores)
            first = self.op("Sub", self.constant(np.float32(1)), second)
            self.op("Concat", first, second, to="probabilities", axis=1)
            above = self.op("Greater", second, self.constant(np.float32(0.5)))
            flat = self.op("Reshape", above, self.constant(np.array([-1], np.int64)))
            self.cast(flat, TensorProto.INT64, "label")
        else:
            if model.link == "softmax":
                self.op("Softmax", scores, to="probabilities", axis=1)
            else:
                self.op("Sigmoid", scores, to="probabilities")
            self.op("ArgMax", scores, to="label", axis=1, keepdims=0)
        return [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["N"]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["N", max(2, classes)]),
        ]

    def answer(self, scores: str, model: Boosted) -> list[onnx.ValueInfoProto]:
        match model.link:
            case "sigmoid" | "sigmoids":
                self.op("Sigmoid", scores, to="prediction")
            case "exp":
                self.op("Exp", scores, to="prediction")
            case "softmax":
                self.op("Softmax", scores, to="prediction", axis=1)
            case "softplus":
                self.op("Softplus", scores, to="prediction")
            case "square":
                self.op("Mul", scores, self.op("Abs", scores), to="prediction")
            case "positive":
                above = self.op("Greater", scores, self.constant(np.float32(0)))
                self.cast(above, TensorProto.FLOAT, "prediction")
            case _:
                self.op("Identity", scores, to="prediction")
        return [helper.make_tensor_value_info("prediction", TensorProto.FLOAT, ["N", model.base.size])]


def _attributes(model: Boosted) -> dict[str, Any]:
    """The attributes of TreeEnsemble-5."""
    columns: dict[str, list[NDArray[Any]]] = {}
    members: list[NDArray[np.float32]] = []
    roots, branches, leaves = [], 0, 0
    for tree in map(_with_branch, model.trees):
        roots.append(branches)
        sides = {}
        for side, child in (("true", tree.true), ("false", tree.false)):
            is_leaf = child < 0
            sides[f"nodes_{side}leafs"] = is_leaf.astype(np.int64)
            sides[f"nodes_{side}nodeids"] = np.where(is_leaf, -1 - child + leaves, child + branches)
        parts: dict[str, NDArray[Any]] = {
            "nodes_featureids": tree.feature,
            "nodes_splits": tree.threshold,
            "nodes_modes": tree.mode,
            "nodes_missing_value_tracks_true": tree.missing.astype(np.int64),
            "leaf_weights": tree.leaves,
            "leaf_targetids": np.full(tree.leaves.size, tree.target, np.int64),
            **sides,
        }
        for key, part in parts.items():
            columns.setdefault(key, []).append(part)
        for chosen in tree.members:
            members += [chosen.astype(np.float32), np.array([np.nan], np.float32)]
        branches += tree.feature.size
        leaves += tree.leaves.size
    found: dict[str, Any] = {key: np.concatenate(parts) for key, parts in columns.items()}
    found["tree_roots"] = np.array(roots, np.int64)
    found["n_targets"] = int(model.base.size)
    found["aggregate_function"] = 1
    if members:
        found["membership_values"] = np.concatenate(members)
    return found


def _with_branch(tree: Tree) -> Tree:
    """A tree that is only a leaf gets a branch with that leaf on both sides, as the specification says."""
    if tree.feature.size:
        return tree
    one = np.array([-1], np.int64)
    return replace(
        tree,
        feature=np.zeros(1, np.int64),
        threshold=np.zeros(1, np.float32),
        mode=np.array([LEQ], np.uint8),
        missing=np.zeros(1, bool),
        true=one,
        false=one,
    )


def check_tree(tree: Tree, features: int, where: str) -> None:
    """Check a tree that was read from a file."""
    branches, leaves = tree.feature.size, tree.leaves.size
    columns = (tree.threshold, tree.mode, tree.missing, tree.true, tree.false)
    if any(column.size != branches for column in columns) or leaves < 1:
        raise ModelError(
            f"{where}: expected as many numbers in each list as the tree has nodes", hint=SAVE_AGAIN
        )
    if branches and (tree.feature.min() < 0 or tree.feature.max() >= features):
        raise ModelError(
            f"{where}: expected features from 0 to {features - 1}, "
            f"got {tree.feature.min()} to {tree.feature.max()}",
            hint=SAVE_AGAIN,
        )
    for child in (tree.true, tree.false):
        if branches and (child.min() < -leaves or child.max() >= branches):
            raise ModelError(f"{where}: expected children that are nodes of the tree", hint=SAVE_AGAIN)
    for chosen in tree.members:
        if chosen.size and (chosen.min() < 0 or chosen.max() > MAX_CATEGORY):
            raise ModelError(
                f"{where}: expected categories from 0 to {MAX_CATEGORY}, got {chosen.max()}",
                hint="number the categories from 0 without gaps, and train again",
            )
