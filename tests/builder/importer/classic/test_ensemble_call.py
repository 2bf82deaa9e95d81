"""Labels, probabilities and transforms of tree ensembles are ONNX Runtime's, for each way to write them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.classic.conftest import model_of

TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")
MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
X = np.random.default_rng(5).integers(-3, 4, (7, 2)).astype("f4") / 2


def stumps(count: int = 3, mode: str = "BRANCH_LEQ", missing: bool = False) -> dict[str, Any]:
    """Trees of one test and two leaves, in the order of ids; node 0 is the root."""
    thresholds = [round(0.5 * k - 0.5, 3) for k in range(count)]
    attributes: dict[str, Any] = {
        "nodes_treeids": [k for k in range(count) for _ in range(3)],
        "nodes_nodeids": [0, 1, 2] * count,
        "nodes_featureids": [f for k in range(count) for f in (k % 2, 0, 0)],
        "nodes_modes": [mode, "LEAF", "LEAF"] * count,
        "nodes_values": [v for t in thresholds for v in (t, 0.0, 0.0)],
        "nodes_truenodeids": [1, 0, 0] * count,
        "nodes_falsenodeids": [2, 0, 0] * count,
    }
    if missing:
        attributes["nodes_missing_value_tracks_true"] = [v for k in range(count) for v in (k % 2, 0, 0)]
    return attributes


def leaves(kind: str, ids: list[int], weights: Any, count: int = 3) -> dict[str, Any]:
    """A weight for each target in each leaf."""
    places = [(k, leaf, one) for k in range(count) for leaf in (1, 2) for one in ids]
    return {
        f"{kind}_treeids": [k for k, _, _ in places],
        f"{kind}_nodeids": [leaf for _, leaf, _ in places],
        f"{kind}_ids": [one for _, _, one in places],
        f"{kind}_weights": [float(weights()) for _ in places],
    }


def trees(operator: str, outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, ["x"], outputs, name=outputs[0], domain="ai.onnx.ml", **attributes)


def test_classifiers_of_one_two_and_three_classes(equal_to_ort: Any) -> None:
    random = np.random.default_rng(1)
    signs = {"nonnegative": lambda: random.uniform(0.01, 0.3), "mixed": random.standard_normal}
    kinds = [([10, 20], [0]), ([10, 20], [1]), ([10, 20], [0, 1]), ([30, 10, 20], [0, 1, 2]), ([7], [0])]
    bases: list[list[float]] = [[], [0.25], [0.25, -0.5], [0.1, 0.2, 0.3]]
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}
    for (labels, ids), sign, base, after in itertools.product(kinds, signs, bases, TRANSFORMS[:3]):
        if len(base) > len(labels) or (len(labels) == 3 and len(base) in (1, 2)):
            continue
        place = len(nodes)
        attributes = {**stumps(), **leaves("class", ids, signs[sign]), "post_transform": after}
        if base:
            attributes["base_values"] = base
        names = [f"y{place}", f"z{place}"]
        nodes.append(trees("TreeEnsembleClassifier", names, classlabels_int64s=labels, **attributes))
        outputs |= {names[0]: TensorProto.INT64, names[1]: TensorProto.FLOAT}
    assert len(nodes) > 70
    equal_to_ort(model_of(nodes, X, outputs), X)


def test_leaves_with_weights_for_some_classes(equal_to_ort: Any) -> None:
    random = np.random.default_rng(4)
    votes: dict[str, Callable[[], float]] = {
        "ones": lambda: 1.0,
        "with zeros": lambda: float(random.integers(0, 2)),
        "mixed": random.standard_normal,
    }
    kinds: dict[str, tuple[list[int], Callable[[int, int], list[int]]]] = {
        "one of two": ([0, 1], lambda tree, leaf: [(tree + leaf) % 2]),
        "only the second, or none": ([5, 9], lambda _tree, leaf: [1] * (leaf == 1)),
        "one of three": ([30, 10, 20], lambda tree, leaf: [(tree + leaf) % 3]),
    }
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}
    for (labels, classes), vote, base, after in itertools.product(
        kinds.values(), votes, [[], [0.1, 0.2, 0.3]], TRANSFORMS[:3]
    ):
        if base and len(labels) == 2:
            continue
        places = [(k, leaf, one) for k in range(3) for leaf in (1, 2) for one in classes(k, leaf)]
        weights = {
            "class_treeids": [k for k, _, _ in places],
            "class_nodeids": [leaf for _, leaf, _ in places],
            "class_ids": [one for _, _, one in places],
            "class_weights": [votes[vote]() for _ in places],
        }
        names = [f"y{len(nodes)}", f"z{len(nodes)}"]
        attributes = {**stumps(), **weights, "post_transform": after} | (
            {"base_values": base} if base else {}
        )
        nodes.append(trees("TreeEnsembleClassifier", names, classlabels_int64s=labels, **attributes))
        outputs |= {names[0]: TensorProto.INT64, names[1]: TensorProto.FLOAT}
    equal_to_ort(model_of(nodes, X, outputs), X)


def test_regressors_of_each_mode_aggregate_and_transform(equal_to_ort: Any) -> None:
    random = np.random.default_rng(2)
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}

    def add(attributes: dict[str, Any]) -> None:
        name = f"y{len(nodes)}"
        nodes.append(trees("TreeEnsembleRegressor", [name], **attributes))
        outputs[name] = TensorProto.FLOAT

    x = X.copy()
    x[::3, 0] = np.nan
    for mode, missing in itertools.product(MODES, (False, True)):
        add(
            {**stumps(mode=mode, missing=missing), **leaves("target", [0], random.standard_normal)}
            | {"n_targets": 1}
        )
    for aggregate, base in itertools.product(("SUM", "AVERAGE", "MIN", "MAX"), ([], [0.5, -0.25])):
        weights = leaves("target", [0, 1], random.standard_normal)
        more = {"base_values": base} if base else {}
        add({**stumps(), **weights, "n_targets": 2, "aggregate_function": aggregate, **more})
    for after in TRANSFORMS:
        weights = leaves("target", [0, 1, 2], lambda: random.uniform(0.05, 0.3))
        add({**stumps(), **weights, "n_targets": 3, "post_transform": after})
    equal_to_ort(model_of(nodes, x, outputs), x, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f8", "i8"])
def test_doubles_and_integers_as_samples(equal_to_ort: Any, dtype: str) -> None:
    # 0.1 + 2^-40 is 0.1 in float32: only a comparison of doubles tells them apart.
    x = np.array([[0.1, 1], [0.1 + 2.0**-40, 2], [3, 0]], dtype)
    attributes = {**stumps(2), **leaves("target", [0], lambda: 1.5, 2), "n_targets": 1}
    if dtype == "i8":
        attributes = {**stumps(2), **leaves("class", [0], lambda: 0.4, 2), "classlabels_int64s": [5, 9]}
        classifier = trees("TreeEnsembleClassifier", ["y", "z"], **attributes)
        model = model_of([classifier], x, {"y": TensorProto.INT64})
        model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, [None, None]))
        equal_to_ort(model, x)
        return
    if dtype == "f8":
        for name in ("nodes_values", "target_weights"):
            values = np.array(attributes.pop(name))
            values[values == -0.5] = 0.1
            attributes[f"{name}_as_tensor"] = numpy_helper.from_array(values)
        attributes["target_weights_as_tensor"] = numpy_helper.from_array(np.array([1.0, 2.0, 4.0, 8.0]))
    node = trees("TreeEnsembleRegressor", ["y"], **attributes)
    equal_to_ort(model_of([node], x, {"y": TensorProto.FLOAT}), x)


def test_the_newest_operator_with_sets(equal_to_ort: Any) -> None:
    tensor = numpy_helper.from_array
    node = trees(
        "TreeEnsemble",
        ["y"],
        tree_roots=[0, 2],
        nodes_featureids=[0, 1, 1],
        nodes_modes=tensor(np.array([6, 0, 6], np.uint8)),
        nodes_splits=tensor(np.array([0, 1.5, 0], np.float32)),
        nodes_truenodeids=[1, 0, 3],
        nodes_falsenodeids=[0, 1, 2],
        nodes_trueleafs=[0, 1, 1],
        nodes_falseleafs=[1, 1, 1],
        nodes_missing_value_tracks_true=[1, 0, 0],
        membership_values=tensor(np.array([1, 3, 35, np.nan, 2, np.nan], np.float32)),
        leaf_targetids=[0, 1, 1, 0],
        leaf_weights=tensor(np.array([1, 2, 4, 8], np.float32)),
        n_targets=2,
    )
    x = np.array([[1, 1], [3, 2], [35, 9], [2, 2], [-1, 0], [40, 2]], np.float32)
    equal_to_ort(model_of([node], x, {"y": TensorProto.FLOAT}, ml=5), x)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes_truenodeids": [0, 0, 0] * 3}, "each node below a root, got 6 others"),
        ({"nodes_falsenodeids": [9, 0, 0] * 3}, "that exist"),
        ({"nodes_featureids": [2, 0, 0] * 3}, "features from 0 to 1, got 0 to 2"),
        ({"nodes_modes": ["BRANCH_ROUND", "LEAF", "LEAF"] * 3}, "BRANCH_ROUND"),
        ({"nodes_values": [0.0] * 8}, "expected 9 numbers in nodes_values, got 8"),
        ({"nodes_values": [float("nan"), 0.0, 0.0] * 3}, "got NaN"),
        ({"target_ids": [5] * 6}, "targets from 0 to 0, got 5 to 5"),
        ({"target_nodeids": [0] * 6}, "weights of leaves only"),
        ({"nodes_nodeids": [0, 0, 0] * 3}, "different ids"),
        ({"nodes_treeids": [-1] * 9}, "ids of trees"),
        ({"aggregate_function": "MEDIAN"}, "MEDIAN"),
    ],
)
def test_an_ensemble_that_is_no_forest_is_refused(change: dict[str, Any], message: str) -> None:
    attributes = {**stumps(), **leaves("target", [0], lambda: 1.0), "n_targets": 1} | change
    node = trees("TreeEnsembleRegressor", ["y"], **attributes)
    with pytest.raises(ModelError, match=message):
        import_onnx(model_of([node], X, {"y": TensorProto.FLOAT}))
