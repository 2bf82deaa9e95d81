from __future__ import annotations

import numpy as np
from onnx import helper

from builder.importer import import_onnx
from tests.builder.importer.conftest import ModelMaker


def test_every_node_of_the_normalised_model_leads_back_to_its_original(make_model: ModelMaker) -> None:
    # A batch norm and a Pad that the optimiser may fuse, an operator that is rewritten, nodes without names.
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], name="stem/conv", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "s", "s", "s"], ["n"]),
        helper.make_node("Mish", ["n"], ["m"]),
        helper.make_node("LpNormalization", ["m"], ["p"], name="norm", axis=1),
        helper.make_node("Identity", ["p"], ["y"], name="end"),
    ]
    weights = {"w": np.ones((4, 3, 3, 3), "f4"), "s": np.ones(4, "f4")}
    model = import_onnx(make_model(nodes, {"x": [1, 3, 8, 8]}, {"y": [1, 4, 8, 8]}, weights, opset=18))
    originals = [node.name for node in model.source.nodes]
    assert originals[0] == "stem/conv"
    assert len(set(originals)) == len(originals)
    found = {node.name: model.source.origins.get(node.name) for node in model.onnx.graph.node}
    assert None not in found.values()
    reached = {originals[origin] for origin in found.values() if origin is not None}
    assert "norm" in reached
    for name, origin in found.items():
        assert origin is not None
        if name.startswith("norm/"):
            assert originals[origin] == "norm"


def test_who_makes_and_reads_a_value_is_known(make_model: ModelMaker) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], name="a"),
        helper.make_node("Add", ["r", "r"], ["y"], name="b"),
    ]
    source = import_onnx(make_model(nodes, {"x": [4]}, {"y": [4]})).source
    assert source.makers() == {"r": 0, "y": 1}
    assert source.readers()["r"] == (1,)
    assert source.inputs == {"x"}
    assert source.outputs == {"y"}
