"""Equal kernels and weights of several graphs exist once, whatever they are called."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import te

from agent.bundle.graph import Graph
from agent.bundle.node import Node, NodeEntry
from agent.bundle.tensor_spec import TensorSpec
from builder.codegen.graph_codegen import GeneratedGraph
from builder.codegen.merged_graphs import MergedGraphs


def kernels(name: str, factor: float, size: int = 4) -> tvm.IRModule:
    x = te.placeholder((size,), "float32", "x")
    y = te.compute((size,), lambda i: x[i] * tvm.tirx.const(factor, "float32"), "y")
    return tvm.IRModule({name: te.create_prim_func([x, y]).with_attr("global_symbol", name)})


def generated(kernel: str, weight: np.ndarray, name: str = "p0") -> GeneratedGraph:
    spec = TensorSpec(name, "FP32", weight.shape)
    nodes = [Node.null("x"), Node.null(name), Node.call("c", kernel, [NodeEntry(1)])]
    graph = Graph.build(nodes, [NodeEntry(2)], ["float32"] * 3, [0, 1, 2], [weight.shape] * 3)
    x = TensorSpec("x", "FP32", weight.shape)
    return GeneratedGraph(graph, ((spec, weight),), (x,), (x,), 0, ((),) * 3)


def test_equal_kernels_and_weights_are_merged() -> None:
    merged, ones = MergedGraphs(), np.ones(4, np.float32)
    merged.add(generated("twice", ones), kernels("twice", 2.0))
    again = merged.add(generated("other_name", ones, "p7"), kernels("other_name", 2.0))
    assert (merged.added, merged.calls, len(merged.weights)) == ([1, 0], [1, 1], 1)
    assert [node.name for node in again.nodes][1] == "p0"
    assert again.nodes[2].func_name == "twice"


def test_others_of_the_same_name_get_another() -> None:
    merged, ones = MergedGraphs(), np.ones(4, np.float32)
    merged.add(generated("scale", ones), kernels("scale", 2.0))
    second = merged.add(generated("scale", 2 * ones), kernels("scale", 3.0))
    assert sorted(merged.kernels) == ["scale", "scale_2"]
    assert second.nodes[2].func_name == "scale_2"
    assert second.nodes[1].name == "p1"
    assert [spec.name for spec, _ in merged.weights] == ["p0", "p1"]
    for name, function in merged.module().functions.items():
        assert function.attrs["global_symbol"] == name.name_hint
