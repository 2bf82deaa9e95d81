"""Trees whose input has no width: the hint says how many columns they read."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import ShapeError
from builder.importer import import_onnx


def model(between: list[str], feature: int) -> onnx.ModelProto:
    """A tree of one test on a feature, behind operators that keep the columns; a leaf names another one."""
    names = ["x", *(f"x{place}" for place in range(len(between)))]
    nodes = [
        helper.make_node("Scaler", [a], [b], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])
        if operator == "Scaler"
        else helper.make_node(operator, [a, "one"], [b])
        for operator, a, b in zip(between, names, names[1:], strict=False)
    ]
    tree = helper.make_node(
        "TreeEnsembleRegressor",
        [names[-1]],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=1,
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[feature, 99, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        target_treeids=[0, 0],
        target_nodeids=[1, 2],
        target_ids=[0, 0],
        target_weights=[1.0, 2.0],
    )
    graph = helper.make_graph(
        [*nodes, tree],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, None])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 1])],
        [onnx.numpy_helper.from_array(np.float32(1), "one")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(("between", "feature"), [([], 0), ([], 6), (["Scaler"], 3), (["Mul", "Add"], 11)])
def test_the_widest_feature_is_told(between: list[str], feature: int) -> None:
    with pytest.raises(ShapeError) as caught:
        import_onnx(model(between, feature))
    assert caught.value.hint is not None
    assert f"the trees read 'x' up to column {feature + 1}" in caught.value.hint
    import_onnx(model(between, feature), input_shapes={"x": [1, feature + 1]})


def test_trees_that_read_something_else_say_nothing() -> None:
    with pytest.raises(ShapeError) as caught:
        import_onnx(model(["MatMul"], 3))
    assert caught.value.hint is not None
    assert "trees" not in caught.value.hint
