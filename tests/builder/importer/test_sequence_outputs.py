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
from builder.errors import ModelError
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


SPLITS = {
    "equal parts": "n = Constant<value = int64 {2}>() s = SplitToSequence<axis = 1>(x, n)",
    "given parts": "n = Constant<value = int64[2] {1, 4}>() s = SplitToSequence<axis = -1>(x, n)",
    "single rows": "s = SplitToSequence<keepdims = 0>(x)",
    "inserted and erased": """
        e = SequenceEmpty() a = SequenceInsert(e, x) y = Neg(x) b = SequenceInsert(a, y)
        z = Abs(x) zero = Constant<value = int64 {0}>() c = SequenceInsert(b, z, zero)
        s = SequenceErase(c, zero)
    """,
    "mapped": """
        y = Neg(x) p = SequenceConstruct(x, y)
        s = SequenceMap(p) <body = f (float[m,n] v) => (float[m,n] w) { w = Exp(v) }>
    """,
}


@pytest.mark.parametrize("case", SPLITS)
def test_sequences_of_tensors(case: str) -> None:
    head = f'<ir_version: 8, opset_import: ["" : 17]> g (float[3,5] x) => (seq(float) s) {{ {SPLITS[case]} }}'
    model = onnx.parser.parse_model(head)
    imported = import_onnx(model)
    x = {"x": np.random.default_rng(1).standard_normal((3, 5)).astype("f4")}
    [wanted] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, x)
    assert [spec.name for spec in imported.outputs] == [f"s_{place}" for place in range(len(wanted))]
    for got, want in zip(run_as_defined(imported.onnx, x), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_sequence_of_unknown_length_is_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x, int64 n) => (seq(float) s)'
        "{ s = SplitToSequence(x, n) }"
    )
    with pytest.raises(ModelError, match="SplitToSequence"):
        import_onnx(model)
