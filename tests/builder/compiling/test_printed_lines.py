"""TVM prints nothing to the terminal while models are compiled, past Python's streams too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.compiler import compile
from tests.builder.importer.tflite.tflite_file import FileSubgraph, write

QUANTISED = {"scales": [1 / 64], "zeros": [-3]}


def gathers() -> bytes:
    """Elements of data and rows of a table, at places that the request gives."""
    node = helper.make_node
    nodes = [
        node("Gather", ["x", "places"], ["part"], axis=1),
        node("Gather", ["table", "places"], ["rows"]),
        node("Add", ["part", "rows"], ["y"]),
    ]
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, [1, 8, 4]), value("places", TensorProto.INT64, [3])]
    table = numpy_helper.from_array(np.arange(32, dtype=np.float32).reshape(8, 4), "table")
    graph = helper.make_graph(nodes, "g", inputs, [value("y", TensorProto.FLOAT, [1, 3, 4])], [table])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return made.SerializeToString()


def tables() -> bytes:
    """A full-integer file: bytes become bytes by a table, and some are picked, as in MoveNet."""
    graph = FileSubgraph()
    graph.inputs = [graph.tensor((1, 8, 4), "int8", name="x", **QUANTISED)]
    curve = graph.tensor((1, 8, 4), "int8", scales=[1 / 256], zeros=[-128])
    graph.outputs = [graph.tensor((1, 2, 4), "int8", name="y", scales=[1 / 256], zeros=[-128])]
    graph.op("LOGISTIC", graph.inputs, [curve])
    places = graph.constant(np.array([6, 1], np.int32))
    graph.op("GATHER", [curve, places], graph.outputs, "GatherOptions", Axis=1, BatchDims=0)
    return write(graph)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "tflite"])
def test_no_line_of_the_compiler_reaches_the_terminal(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"m.{kind}"
    path.write_bytes(gathers() if kind == "onnx" else tables())
    if kind == "onnx":
        onnx.checker.check_model(str(path))
    compile(path)
    assert capfd.readouterr() == ("", "")
