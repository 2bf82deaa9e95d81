"""Support vector machines are ONNX Runtime's: kernels, votes, probabilities, two classes and many."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.classic.conftest import model_of

FEATURES = 4
RANDOM = np.random.default_rng(4)
X = RANDOM.standard_normal((9, FEATURES)).astype("f4")
KERNELS = ("LINEAR", "POLY", "RBF", "SIGMOID")


def drawn(*shape: int) -> list[float]:
    return [float(value) for value in RANDOM.standard_normal(shape).astype("f4").reshape(-1)]


def svm(operator: str, outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, ["x"], outputs, name=outputs[0], domain="ai.onnx.ml", **attributes)


def classifier(kernel: str, classes: int, *, probabilities: bool, name: str = "y") -> onnx.NodeProto:
    pairs, each = classes * (classes - 1) // 2, 5
    more = {"prob_a": [-abs(v) - 0.5 for v in drawn(pairs)], "prob_b": drawn(pairs)} if probabilities else {}
    return svm(
        "SVMClassifier",
        [name, f"z{name}"],
        kernel_type=kernel,
        kernel_params=[0.3, 0.1, 3.0],
        classlabels_ints=[10 * (one + 1) for one in range(classes)],
        vectors_per_class=[each] * classes,
        support_vectors=drawn(each * classes, FEATURES),
        coefficients=drawn(classes - 1, each * classes),
        rho=drawn(pairs),
        **more,
    )


def test_classifiers_of_every_kernel(equal_to_ort: Any) -> None:
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}
    for kernel, classes, probabilities in itertools.product(KERNELS, (2, 3, 5), (False, True)):
        name = f"y{len(nodes)}"
        nodes.append(classifier(kernel, classes, probabilities=probabilities, name=name))
        outputs |= {name: TensorProto.INT64, f"z{name}": TensorProto.FLOAT}
    equal_to_ort(model_of(nodes, X, outputs), X, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_classes_that_tie(kernel: str, equal_to_ort: Any) -> None:
    """Support vectors on the axes, as far from one class as from another: the sums cancel to 0 exactly."""
    vectors = np.concatenate([np.eye(FEATURES), np.eye(FEATURES)[::-1], 2 * np.eye(FEATURES)]).astype("f4")
    weights = np.array([0.1, 0.7, 0.3, 0.9], "f4")
    coefficients = np.array([[*weights, *-weights[::-1], *weights], [*weights, *weights, *-weights]])
    node = svm(
        "SVMClassifier",
        ["y", "z"],
        kernel_type=kernel,
        kernel_params=[0.3, 0.1, 3.0],
        classlabels_ints=[30, 10, 20],
        vectors_per_class=[FEATURES] * 3,
        support_vectors=vectors.reshape(-1).tolist(),
        coefficients=coefficients.astype("f4").reshape(-1).tolist(),
        rho=[0.0, 0.0, 0.0],
    )
    x = np.array(list(itertools.product([0, 1, 3], repeat=FEATURES)), "f4")
    equal_to_ort(model_of([node], x, {"y": TensorProto.INT64, "z": TensorProto.FLOAT}), x, atol=1e-4)


def test_regressors_of_every_kernel_and_one_class(equal_to_ort: Any) -> None:
    nodes: list[onnx.NodeProto] = []
    outputs: dict[str, int] = {}
    for kernel, one_class in itertools.product((*KERNELS, ""), (0, 1)):
        name = f"y{len(nodes)}"
        more = (
            {"kernel_type": kernel, "n_supports": 6, "support_vectors": drawn(6, FEATURES)}
            if kernel
            else {"n_supports": 0}
        )
        nodes.append(
            svm(
                "SVMRegressor",
                [name],
                kernel_params=[0.3, 0.1, 2.0],
                coefficients=drawn(6 if kernel else FEATURES),
                rho=drawn(1),
                one_class=one_class,
                **more,
            )
        )
        outputs[name] = TensorProto.FLOAT
    equal_to_ort(model_of(nodes, X, outputs), X, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("coefficients", [1.0], "expected 30 numbers in coefficients, got 1"),
        ("rho", [1.0, 2.0], "expected 3 numbers in rho, got 2"),
        ("support_vectors", [0.0] * 7, "in support_vectors, got 7"),
        ("vectors_per_class", [5, 5], "expected 3 numbers in vectors_per_class, got 2"),
        ("kernel_type", "WAVELET", "WAVELET"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attribute: str, value: Any, message: str) -> None:
    node = classifier("RBF", 3, probabilities=False)
    kept = [one for one in node.attribute if one.name != attribute]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(attribute, value)])
    outputs = {"y": TensorProto.INT64, "zy": TensorProto.FLOAT}
    with pytest.raises(ModelError, match=message):
        import_onnx(model_of([node], X, outputs))
