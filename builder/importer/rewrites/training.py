"""Steps of optimisers, ai.onnx.preview.training: each is arithmetic on its inputs.

Source: ONNX operator specification, Adagrad-1, Adam-1 and Momentum-1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx

from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes
from builder.importer.rewrites.replacement import Replacement


@dataclass(frozen=True, slots=True)
class _Step:
    """What the steps share: nodes, options, rate and count of updates, and how many tensors are optimised."""

    new: Replacement
    options: dict[str, Any]
    found: ValueType
    rate: str
    count: str
    tensors: int

    def number(self, name: str, default: float) -> str:
        return self.new.constant(float(self.options.get(name, default)), self.found.dtype)

    def regularised(self, x: str, gradient: str) -> str:
        """The gradient with that of the penalty on the tensor's norm."""
        return self.new.op("Add", self.new.op("Mul", x, self.number("norm_coefficient", 0.0)), gradient)


def _step(node: onnx.NodeProto, graph: OnnxGraph, kinds: int) -> _Step | None:
    """Read a node with `kinds` inputs for each tensor: the tensors, then their gradients, ..."""
    tensors = (len(node.input) - 2) // kinds
    found = graph.type_of(node.input[2])
    if found is None or tensors * kinds != len(node.input) - 2:
        return None
    new = Replacement(node, graph)
    count = new.cast(node.input[1], found.elem_type)
    rate = new.cast(node.input[0], found.elem_type)
    return _Step(new, attributes(node), found, rate, count, tensors)


def adagrad(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Adagrad of rate, count, tensors, gradients, sums of squares."""
    step = _step(node, graph, 3)
    if step is None:
        return None
    new, one = step.new, step.new.constant(1, step.found.dtype)
    decay = new.op("Add", one, new.op("Mul", step.count, step.number("decay_factor", 0.0)))
    rate = new.op("Div", step.rate, decay)
    for index in range(step.tensors):
        x, g, h = (node.input[2 + index + kind * step.tensors] for kind in range(3))
        g = step.regularised(x, g)
        h = new.op("Add", h, new.op("Mul", g, g), to=node.output[step.tensors + index])
        root = new.op("Add", new.op("Sqrt", h), step.number("epsilon", 1e-6))
        new.op("Sub", x, new.op("Div", new.op("Mul", rate, g), root), to=node.output[index])
    return new.nodes


def adam(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Adam of rate, count, tensors, gradients, means, means of squares."""
    step = _step(node, graph, 4)
    if step is None:
        return None
    new, dtype = step.new, step.found.dtype
    one = new.constant(1, dtype)
    alpha, beta = float(step.options.get("alpha", 0.9)), float(step.options.get("beta", 0.999))
    corrected = new.op("Sqrt", new.op("Sub", one, new.op("Pow", new.constant(beta, dtype), step.count)))
    faded = new.op("Sub", one, new.op("Pow", new.constant(alpha, dtype), step.count))
    started = new.op("Greater", step.count, new.constant(0, dtype))
    safe = new.op("Where", started, faded, one)
    rate = new.op("Where", started, new.op("Div", new.op("Mul", step.rate, corrected), safe), step.rate)
    for index in range(step.tensors):
        x, g, v, h = (node.input[2 + index + kind * step.tensors] for kind in range(4))
        made = [node.output[index + kind * step.tensors] for kind in range(3)]
        g = step.regularised(x, g)
        v = _mean(new, v, g, alpha, dtype, made[1])
        h = _mean(new, h, new.op("Mul", g, g), beta, dtype, made[2])
        root = new.op("Add", new.op("Sqrt", h), step.number("epsilon", 1e-6))
        moved = new.op("Sub", x, new.op("Div", new.op("Mul", rate, v), root))
        kept = 1 - float(step.options.get("norm_coefficient_post", 0.0))
        new.op("Mul", moved, new.constant(kept, dtype), to=made[0])
    return new.nodes


def _mean(new: Replacement, old: str, value: str, weight: float, dtype: Any, to: str) -> str:  # noqa: ANN401 - NumPy's
    kept = new.op("Mul", old, new.constant(weight, dtype))
    return new.op("Add", kept, new.op("Mul", value, new.constant(1 - weight, dtype)), to=to)


def momentum(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Momentum of rate, count, tensors, gradients, momenta; standard or Nesterov's."""
    step = _step(node, graph, 3)
    if step is None:
        return None
    new, dtype = step.new, step.found.dtype
    started = new.op("Greater", step.count, new.constant(0, dtype))
    beta = new.op("Where", started, step.number("beta", 1.0), new.constant(1, dtype))
    alpha = step.number("alpha", 0.0)
    for index in range(step.tensors):
        x, g, v = (node.input[2 + index + kind * step.tensors] for kind in range(3))
        g = step.regularised(x, g)
        weighted = new.op("Mul", beta, g)
        v = new.op("Add", new.op("Mul", alpha, v), weighted, to=node.output[step.tensors + index])
        way = v if step.options["mode"] == "standard" else new.op("Add", g, new.op("Mul", alpha, v))
        new.op("Sub", x, new.op("Mul", step.rate, way), to=node.output[index])
    return new.nodes
