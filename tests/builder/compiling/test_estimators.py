"""Estimators of scikit-learn, exported by skl2onnx and compiled: the numbers of ONNX Runtime and the labels.

`compile` itself compares each with ONNX Runtime on samples near the trees' thresholds; here the original
file, with its strings and maps, is compared on data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from sklearn import (
    cluster,
    datasets,
    decomposition,
    discriminant_analysis,
    ensemble,
    impute,
    linear_model,
    mixture,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)

from builder.compiler import compile as compile_model
from builder.importer import import_onnx
from builder.running.in_memory import execute

NAMES = np.array(["setosa", "versicolor", "virginica"])
ROWS = 6


def pipe(*steps: Any) -> Any:
    return pipeline.make_pipeline(*steps)


# Name -> estimator and data set.
ESTIMATORS: dict[str, tuple[Callable[[], Any], str]] = {
    "decision tree": (lambda: tree.DecisionTreeClassifier(random_state=0), "iris"),
    "decision tree, names": (lambda: tree.DecisionTreeClassifier(random_state=0), "names"),
    "extra trees": (lambda: ensemble.ExtraTreesRegressor(9, random_state=0), "diabetes"),
    "random forest": (lambda: ensemble.RandomForestClassifier(20, random_state=0), "digits"),
    "random forest, two classes": (lambda: ensemble.RandomForestClassifier(9, random_state=0), "cancer"),
    "gradient boosting": (lambda: ensemble.GradientBoostingClassifier(n_estimators=9), "wine"),
    "AdaBoost": (lambda: ensemble.AdaBoostClassifier(n_estimators=2, random_state=0), "iris"),
    "bagging": (lambda: ensemble.BaggingClassifier(n_estimators=3, random_state=0), "iris"),
    "voting": (
        lambda: ensemble.VotingClassifier(
            [("a", linear_model.LogisticRegression(max_iter=500)), ("b", tree.DecisionTreeClassifier())],
            voting="soft",
            flatten_transform=False,
        ),
        "names",
    ),
    "isolation forest": (lambda: ensemble.IsolationForest(n_estimators=2, random_state=0), "iris"),
    "SVC": (lambda: svm.SVC(probability=True, random_state=0), "iris"),
    "SVC, two classes": (lambda: svm.SVC(probability=True, random_state=0), "cancer"),
    "NuSVC": (lambda: svm.NuSVC(kernel="poly"), "iris"),
    "LinearSVC": (svm.LinearSVC, "cancer"),
    "SVR": (svm.SVR, "diabetes"),
    "logistic regression": (lambda: linear_model.LogisticRegression(max_iter=2000), "names"),
    "ridge": (linear_model.Ridge, "diabetes"),
    "neighbours": (neighbors.KNeighborsClassifier, "iris"),
    "naive Bayes": (naive_bayes.GaussianNB, "iris"),
    "perceptrons": (lambda: neural_network.MLPClassifier(max_iter=60, random_state=0), "iris"),
    "k-means": (lambda: cluster.KMeans(3, n_init=1, random_state=0), "iris"),
    "Gaussian mixture": (lambda: mixture.GaussianMixture(2, random_state=0), "iris"),
    "discriminant analysis": (discriminant_analysis.LinearDiscriminantAnalysis, "wine"),
    "imputer, scaler, PCA": (
        lambda: pipe(
            impute.SimpleImputer(),
            preprocessing.StandardScaler(),
            decomposition.PCA(2),
            linear_model.LogisticRegression(),
        ),
        "missing",
    ),
    "polynomials": (
        lambda: pipe(preprocessing.MinMaxScaler(), preprocessing.PolynomialFeatures(2), linear_model.Ridge()),
        "diabetes",
    ),
    "normaliser, binariser": (
        lambda: pipe(
            preprocessing.Normalizer(),
            preprocessing.Binarizer(threshold=0.3),
            tree.DecisionTreeClassifier(random_state=0),
        ),
        "iris",
    ),
}


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    same = {"cancer": "breast_cancer", "names": "iris", "missing": "iris"}
    x, y = getattr(datasets, f"load_{same.get(name, name)}")(return_X_y=True)
    if name == "missing":
        x[::7, 1] = np.nan
    return x.astype("f4"), NAMES[y] if name == "names" else y


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_gives_the_labels_and_numbers_of_its_export(name: str) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    make, data_set = ESTIMATORS[name]
    x, y = data(data_set)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        estimator = make().fit(x, y)
        # skl2onnx writes isolation forests only for older versions of the operators.
        target = {"": 18, "ai.onnx.ml": 3} if "isolation" in name else None
        model = skl2onnx.to_onnx(estimator, x[:1], target_opset=target)
    samples = np.ascontiguousarray(x[:: len(x) // ROWS][:ROWS])
    imported = import_onnx(model, input_shapes={"X": samples.shape})
    members = compile_model(imported).members
    outputs = execute(members["mod.so"], members["mod.json"], members["mod.params"], {"X": samples})
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for spec, got, want in zip(imported.outputs, outputs, session.run(None, {"X": samples}), strict=True):
        expected = np.array([list(row.values()) for row in want]) if isinstance(want, list) else want
        if expected.dtype.kind in "OU":
            np.testing.assert_array_equal(np.array(imported.labels)[got], expected)
            assert members["labels.txt"].decode().split() == list(imported.labels)
        elif expected.dtype.kind in "iu":
            np.testing.assert_array_equal(got, expected)
        else:
            scale = max(1.0, float(np.abs(expected).max()))
            np.testing.assert_allclose(
                np.asarray(got, "f8"), expected, rtol=0, atol=1e-5 * scale, err_msg=spec.name
            )
