"""Outputs that are sequences, and labels of several tables in one output: classifiers of many targets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from builder.compiling.judge import Judge
from builder.compiling.parity import run_as_defined
from builder.importer import import_onnx

X = np.random.default_rng(0).standard_normal((3, 2)).astype("f4")


def classifier(place: int, labels: Sequence[str]) -> onnx.NodeProto:
    random = np.random.default_rng(place)
    return helper.make_node(
        "LinearClassifier",
        ["x"],
        [f"label{place}", f"scores{place}"],
        domain="ai.onnx.ml",
        classlabels_strings=list(labels),
        coefficients=random.standard_normal(2 * len(labels)).tolist(),
        intercepts=random.standard_normal(len(labels)).tolist(),
    )


def saved(folder: Path, tables: Sequence[Sequence[str]]) -> Path:
    """A classifier for each table; their labels are the columns of one output, their scores a sequence."""
    places = range(len(tables))
    nodes = [
        *(classifier(place, labels) for place, labels in enumerate(tables)),
        *(helper.make_node("Reshape", [f"label{p}", "column"], [f"column{p}"]) for p in places),
        helper.make_node("Concat", [f"column{p}" for p in places], ["labels"], axis=1),
        helper.make_node("SequenceConstruct", [f"scores{p}" for p in places], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "many targets",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 2])],
        [
            helper.make_tensor_value_info("labels", TensorProto.STRING, [3, len(tables)]),
            helper.make_tensor_sequence_value_info("scores", TensorProto.FLOAT, None),
        ],
        [helper.make_tensor("column", TensorProto.INT64, [2], [-1, 1])],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    "tables",
    [["abc", "abc"], ["abc", "dae", "cb"], ["abcd", "ab"]],
    ids=["the same labels", "other labels", "a part of the labels"],
)
def test_many_targets(tables: list[str], tmp_path: Path) -> None:
    path = saved(tmp_path, tables)
    model = import_onnx(path)
    names = [spec.name for spec in model.outputs]
    assert names == ["labels", *(f"scores_{place}" for place in range(len(tables)))]
    labels, scores = onnxruntime.InferenceSession(str(path)).run(None, {"x": X})
    found = run_as_defined(model.onnx, {"x": X})
    assert np.array_equal(np.array(model.labels)[found[0].astype(np.int64)], labels)
    for got, want in zip(found[1:], scores, strict=True):
        np.testing.assert_allclose(got.astype("f4"), want, rtol=1e-6)
    judge = Judge(model)
    for got, want in zip(judge.outputs({"x": X}), found, strict=True):
        np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), rtol=1e-6)
    assert judge.reference.endswith("running the file itself")
