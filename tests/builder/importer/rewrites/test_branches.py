"""`If` on a value that comes with a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.errors import UnsupportedOperatorError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import BOOL, ModelMaker, operators


def branch(name: str, *nodes: onnx.NodeProto) -> onnx.GraphProto:
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, [2, 3])
    return helper.make_graph(list(nodes), name, [], [output])


def choice(make_model: ModelMaker, then: onnx.NodeProto, other: onnx.NodeProto) -> onnx.ModelProto:
    node = helper.make_node(
        "If", ["go"], ["y"], name="choose", then_branch=branch("a", then), else_branch=branch("b", other)
    )
    return make_model([node], {"go": ([], BOOL), "x": [2, 3], "z": [2, 3]}, {"y": [2, 3]})


@pytest.mark.parametrize("go", [True, False])
def test_the_branch_is_chosen_at_run_time(
    make_model: ModelMaker, noise: Any, run_onnx: Any, go: bool
) -> None:
    then = helper.make_node("Add", ["x", "z"], ["out"])
    model = choice(make_model, then, helper.make_node("Sqrt", ["x"], ["out"]))
    imported = import_onnx(model).onnx
    assert "If" not in operators(imported)
    feeds = {"go": np.array(go), "x": noise(2, 3), "z": noise(2, 3)}
    np.testing.assert_array_equal(run_onnx(imported, feeds)[0], run_onnx(model, feeds)[0])


def test_a_division_that_the_condition_may_guard_is_refused(make_model: ModelMaker) -> None:
    guarded = helper.make_node("Div", ["x", "z"], ["out"])
    model = choice(make_model, guarded, helper.make_node("Neg", ["x"], ["out"]))
    with pytest.raises(UnsupportedOperatorError, match=r"If \(choose\)") as caught:
        import_onnx(model)
    assert "--input-values" in (caught.value.hint or "")
