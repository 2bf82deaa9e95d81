"""Networks with concatenations: parts are made in place, and agree with ONNX Runtime and with copies."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import builder
from agent.bundle.graph import Graph
from agent.bundle.params import index_params
from agent.runtime import graph_executor
from agent.runtime.storage import Array, Block, allocate
from builder.bundles.package import Package
from builder.running.in_memory import load_kernels

CHANNELS = 32


class Network:
    """Builds a model of convolutions and concatenations."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.state = np.random.RandomState(5)

    def node(self, op: str, inputs: Sequence[str], **attrs: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attrs))
        return name

    def conv(self, x: str, before: int, after: int, size: int = 3, *, relu: bool = True) -> str:
        weight = self.state.randn(after, before, size, size).astype("f4") / (size * before**0.5)
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(weight, name))
        y = self.node("Conv", [x, name], pads=[size // 2] * 4)
        return self.node("Relu", [y]) if relu else y

    def model(self, result: str, after: int, pixels: int, batch: int = 1) -> bytes:
        x = helper.make_tensor_value_info("x", 1, [batch, CHANNELS, pixels, pixels])
        y = helper.make_tensor_value_info(result, 1, [batch, after, pixels, pixels])
        graph = helper.make_graph(self.nodes, "g", [x], [y], self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return model.SerializeToString()


def dense(batch: int = 1) -> bytes:
    """Return a dense block: each layer rectifies and reads a concatenation of all layers before."""
    net = Network()
    parts, width = [net.conv("x", CHANNELS, 32)], 32
    for _ in range(4):
        whole = net.node("Concat", parts, axis=1) if len(parts) > 1 else parts[0]
        parts.append(net.conv(net.conv(net.node("Relu", [whole]), width, 16, 1), 16, 16, relu=False))
        width += 16
    return net.model(net.conv(net.node("Concat", parts, axis=1), width, 16, 1), 16, 7, batch)


def fire() -> bytes:
    net = Network()
    squeezed = net.conv("x", CHANNELS, 16, 1)
    whole = net.node("Concat", [net.conv(squeezed, 16, 32, 1), net.conv(squeezed, 16, 48)], axis=1)
    return net.model(net.conv(whole, 80, 16, 1), 16, 9)


def skip() -> bytes:
    """Return a U-Net of two levels: the skip is also read by what is between."""
    net = Network()
    first = net.conv("x", CHANNELS, 32)
    low = net.node("MaxPool", [first], kernel_shape=[2, 2], strides=[2, 2])
    low = net.conv(low, 32, 32)
    net.weights.append(numpy_helper.from_array(np.array([1, 1, 2, 2], "f4"), "scales"))
    high = net.node("Resize", [low, "", "scales"], mode="nearest")
    return net.model(net.conv(net.node("Concat", [high, first], axis=1), 64, 16), 16, 8)


def split() -> bytes:
    """Return YOLO's C2f: the two halves of a convolution, and what is computed of the second one."""
    net = Network()
    whole = net.conv("x", CHANNELS, 64, 1)
    net.weights.append(numpy_helper.from_array(np.array([32, 32]), "halves"))
    net.nodes.append(helper.make_node("Split", [whole, "halves"], ["left", "right"], "split", axis=1))
    one = net.conv("right", 32, 32)
    two = net.conv(one, 32, 32)
    parts = net.node("Concat", ["left", "right", one, two], axis=1)
    return net.model(net.conv(parts, 128, 16, 1), 16, 8)


def poisoned(nbytes: int) -> Block:
    block = allocate(nbytes)
    block[...] = 0xFF  # NaN
    return block


def run(package: Package, graph: Graph, inputs: Array) -> tuple[Array, graph_executor.GraphModule]:
    with mock.patch("agent.runtime.memory.allocate", poisoned):
        module = graph_executor.create(graph, load_kernels(package.members["mod.so"]))
        module.load_params(package.members["mod.params"])
        for _ in range(2):  # the second run finds the memory as the first has left it
            module.run(x=inputs)
        return module.get_output(0), module


def without_joins(graph: bytes) -> bytes:
    """Return the graph as a reader understands it that does not know joins."""
    document = json.loads(graph)
    for node in document["nodes"]:
        node.get("attrs", {}).pop("joins", None)
    return json.dumps(document).encode()


@pytest.mark.slow
@pytest.mark.parametrize(("make", "joins"), [(dense, 4), (fire, 1), (skip, 1), (split, 1)])
def test_concatenations_are_in_place(make: Callable[[], bytes], joins: int, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(make())
    package = builder.compile(tmp_path / "m.onnx", "host")  # which compares it with ONNX Runtime
    text = package.members["mod.json"]
    graph = Graph.from_json(text)
    assert [node.joins for node in graph.nodes if not node.is_null].count(True) == joins
    samples = package.members["samples/inputs.params"], package.members["samples/outputs.params"]
    (given,), (wanted,) = (list(index_params(each)) for each in samples)
    x, y = (
        np.frombuffer(raw, "f4", each.nbytes // 4, each.offset).reshape(each.spec.shape)
        for raw, each in zip(samples, (given, wanted), strict=True)
    )
    got, module = run(package, graph, x)
    assert np.abs(got - y).max() <= 1e-5 * np.abs(y).max()
    copied, other = run(package, Graph.from_json(without_joins(text)), x)
    np.testing.assert_array_equal(copied, got)
    assert len(other._program.steps) == len(module._program.steps) + joins


@pytest.mark.slow
def test_concatenations_of_a_batch_are_copied(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(dense(batch=2))
    package = builder.compile(tmp_path / "m.onnx", "host")
    assert b'"joins"' not in package.members["mod.json"]
