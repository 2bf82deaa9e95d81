"""Small float networks with seeded weights, and samples for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Array = NDArray[Any]


class Network:
    """Builds a model node by node; weights are drawn from one seeded generator."""

    def __init__(self, opset: int = 17, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{kind.lower()}_{len(self.nodes)}" + (f"_{i}" if i else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"node_{names[0]}", **attributes))
        return names[0]

    def conv(
        self, x: str, inputs: int, outputs: int, kernel: int = 3, *, bias: bool = True, **more: Any
    ) -> str:
        group = more.get("group", 1)
        fan_in = inputs // group * kernel * kernel
        weight = self.rng.standard_normal((outputs, inputs // group, kernel, kernel)) * np.sqrt(2 / fan_in)
        constants = [self.constant(weight)]
        if bias:
            constants.append(self.constant(self.rng.standard_normal(outputs) * 0.1))
        return self.op("Conv", x, *constants, pads=[kernel // 2] * 4, **more)

    def model(self, *outputs: str) -> onnx.ModelProto:
        infos = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "network", self.inputs, infos, initializer=self.constants)
        opsets = [helper.make_opsetid("", self.opset)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        return onnx.shape_inference.infer_shapes(model)


def samples(count: int, shape: Sequence[int], seed: int = 1) -> Array:
    """Normally distributed samples, each with its own mean and spread: [count, *shape]."""
    rng = np.random.default_rng(seed)
    spread = rng.uniform(0.5, 2, (count, *[1] * len(shape)))
    mean = rng.uniform(-1, 1, (count, *[1] * len(shape)))
    return (rng.standard_normal((count, *shape)) * spread + mean).astype(np.float32)


def operators(model: onnx.ModelProto) -> list[str]:
    """Its operators without the conversions."""
    return [n.op_type for n in model.graph.node if not n.op_type.endswith("Linear")]


def node(model: onnx.ModelProto, kind: str, which: int = 0) -> onnx.NodeProto:
    return [n for n in model.graph.node if n.op_type == kind][which]


def maker(model: onnx.ModelProto, name: str) -> str:
    """The operator that makes a value, or `input`."""
    return next((str(n.op_type) for n in model.graph.node if name in n.output), "input")


def readers(model: onnx.ModelProto, name: str) -> list[str]:
    return [str(n.op_type) for n in model.graph.node if name in n.input]


def constants(model: onnx.ModelProto) -> Mapping[str, Array]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
