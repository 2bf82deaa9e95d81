"""What is between a framework's process and the importer: names, and inputs for the reference."""

from __future__ import annotations

from onnx import TensorProto, helper

from builder.importer.frameworks.conversion import rename


def test_inputs_and_outputs_are_renamed_everywhere() -> None:
    """Also in a branch, and where another value has the name."""
    inner = helper.make_graph(
        [helper.make_node("Neg", ["serving_x:0"], ["n"])],
        "then",
        [],
        [helper.make_tensor_value_info("n", TensorProto.FLOAT, [2])],
    )
    nodes = [
        helper.make_node("Relu", ["serving_x:0"], ["x"]),
        helper.make_node("If", ["c"], ["b"], then_branch=inner, else_branch=inner),
        helper.make_node("Add", ["x", "b"], ["Identity"]),
    ]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])
        for name in ("serving_x:0", "Identity")
    }
    graph = helper.make_graph(nodes, "g", [values["serving_x:0"]], [values["Identity"]])
    rename(graph, {"serving_x:0": "x", "Identity": "output"})
    assert graph.input[0].name == "x"
    assert graph.output[0].name == "output"
    assert list(graph.node[0].input) == ["x"]
    assert list(graph.node[0].output) == ["x_"]
    assert graph.node[1].attribute[0].g.node[0].input[0] == "x"
    assert list(graph.node[2].input) == ["x_", "b"]
    assert list(graph.node[2].output) == ["output"]
