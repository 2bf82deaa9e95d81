"""How PyTorch's export is named and checked; what needs PyTorch itself is tested in tests/frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from builder.importer.frameworks.pytorch_names import name_nodes, name_outputs


def node(operator: str, inputs: list[str], output: str, *scopes: str, fx: str = "") -> Any:
    made = helper.make_node(operator, inputs, [output])
    for key, value in (("name_scopes", str(list(scopes))), ("fx_node", f"%{fx} : [num_users=1] = ...")):
        made.metadata_props.add(key=f"pkg.torch.onnx.{key}", value=value)
    return made


def graph(*nodes: Any, outputs: tuple[str, ...] = ("c",), weights: tuple[str, ...] = ()) -> Any:
    return helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in outputs],
        [numpy_helper.from_array(np.zeros(2, np.float32), name) for name in weights],
    )


def test_nodes_are_named_after_modules() -> None:
    made = graph(
        node("Shape", ["layer1.0.conv1.weight"], "s", "", "layer1", "layer1.0", "layer1.0.conv1", "conv2d"),
        node("Conv", ["x", "layer1.0.conv1.weight"], "a", "", "layer1.0", "layer1.0.conv1", "conv2d"),
        node("Relu", ["a"], "b", "", "layer1.0", "relu"),
        node("Add", ["a", "b"], "d", "", "layer1.0", "add"),
        node("Add", ["b", "d"], "e", "", "layer1.0", "add_1"),
        node("Gemm", ["e", "head.weight"], "f"),
        node("Relu", ["f"], "c", fx="relu_7"),
        weights=("layer1.0.conv1.weight", "head.weight"),
    )
    name_nodes(made)
    assert [each.name for each in made.node] == [
        "layer1.0.conv1/Shape",
        "layer1.0.conv1",
        "layer1.0/Relu",
        "layer1.0/Add",
        "layer1.0/Add_1",
        "head",
        "relu_7",
    ]
    assert not any(each.metadata_props for each in made.node)


def test_outputs_are_named_after_their_places() -> None:
    """Also one that is returned twice, an input that is returned, and a name that a value has."""
    made = graph(node("Relu", ["x"], "logits"), node("Neg", ["logits"], "c"), outputs=("c", "c", "x"))
    name_outputs(made, ["logits", "again", "output_2"])
    assert [value.name for value in made.output] == ["logits_", "again", "output_2"]
    assert [(each.op_type, list(each.input), list(each.output)) for each in made.node] == [
        ("Relu", ["x"], ["logits"]),
        ("Neg", ["logits"], ["logits_"]),
        ("Identity", ["logits_"], ["again"]),
        ("Identity", ["x"], ["output_2"]),
    ]
