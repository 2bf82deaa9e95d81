"""What is counted as a refusal, and what is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from benchmarks.conformance.case import Case
from benchmarks.conformance.trial import try_case
from benchmarks.conformance.verdict import APART, REFUSED

NODES = {
    "an axis of a scalar": (helper.make_node("ReduceMax", ["x"], ["y"], axes=[0], keepdims=0), [], APART),
    "a type that the operator does not take": (helper.make_node("Not", ["x"], ["y"]), [2], APART),
    "an operator that we lack": (helper.make_node("Det", ["x"], ["y"]), [40, 40], REFUSED),
}


@pytest.mark.parametrize("name", NODES)
def test_a_file_that_is_no_valid_model_is_not_counted_as_refused(tmp_path: Path, name: str) -> None:
    node, shape, kind = NODES[name]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = onnx.ValueInfoProto(name="y")
    graph = helper.make_graph([node], "case", [x], [y])
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    case = Case("pytorch", name, node.op_type, path, {"x": np.zeros(shape, np.float32)}, [])
    assert try_case(case).kind == kind
