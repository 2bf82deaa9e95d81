"""Build the nodes that replace a node, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike
from onnx import helper

from builder.importer.onnx_graph import OnnxGraph

Attribute: TypeAlias = int | float | str | Sequence[int]
# Returns the nodes that replace a node, or None to keep it.
Rewrite: TypeAlias = Callable[[onnx.NodeProto, OnnxGraph], Sequence[onnx.NodeProto] | None]

# From this opset on, all reductions take their axes as an input; ReduceSum has done so since 13.
_AXES_ARE_INPUT: Final = 18


class Replacement:
    """Collects the nodes that replace a node.

    `node`: the node to be replaced. New nodes contain its name, so messages still point to it.
    """

    def __init__(self, node: onnx.NodeProto, graph: OnnxGraph) -> None:
        self._node = node
        self._graph = graph
        self.nodes: list[onnx.NodeProto] = []

    def op(self, op_type: str, *inputs: str, to: str = "", **attributes: Attribute) -> str:
        """Add a node with one output and return the output's name: `to`, or a new one."""
        output = to or self._graph.fresh(f"{self._node.name}/{op_type}")
        self._add(op_type, inputs, [output], **attributes)
        return output

    def op_many(self, op_type: str, count: int, *inputs: str, **attributes: Attribute) -> list[str]:
        """Add a node with `count` outputs and return their names."""
        outputs = [self._graph.fresh(f"{self._node.name}/{op_type}") for _ in range(count)]
        self._add(op_type, inputs, outputs, **attributes)
        return outputs

    def _add(self, op_type: str, inputs: Sequence[str], outputs: list[str], **attributes: Attribute) -> None:
        name = f"{self._node.name}/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, **attributes))

    def cast(self, x: str, elem_type: int, to: str = "") -> str:
        """Add a Cast; `op` cannot, because Cast has an attribute called `to`."""
        output = to or self._graph.fresh(f"{self._node.name}/Cast")
        name = f"{self._node.name}/Cast_{len(self.nodes)}"
        self.nodes.append(helper.make_node("Cast", [x], [output], name=name, to=elem_type))
        return output

    def constant(self, values: ArrayLike, dtype: DTypeLike) -> str:
        """Add a weight and return its name."""
        return self._graph.add_constant(np.asarray(values, dtype), f"{self._node.name}/constant")

    def ints(self, *values: int) -> str:
        """Add a weight of INT64, the type of shapes and axes, and return its name."""
        return self.constant(values, np.int64)

    def reduce(self, op_type: str, x: str, axes: Sequence[int], *, keep: bool, to: str = "") -> str:
        """Add a reduction in the form of the model's opset; `keep` keeps reduced axes with extent 1."""
        if self._graph.opset >= _AXES_ARE_INPUT or op_type == "ReduceSum":
            return self.op(op_type, x, self.ints(*axes), to=to, keepdims=int(keep))
        return self.op(op_type, x, to=to, axes=list(axes), keepdims=int(keep))


def input_name(node: onnx.NodeProto, index: int) -> str:
    """Name of an optional input, empty if it is absent."""
    return node.input[index] if index < len(node.input) else ""


def output_name(node: onnx.NodeProto, index: int) -> str:
    """Name of an optional output, empty if it is absent."""
    return node.output[index] if index < len(node.output) else ""


def constant_integer(node: onnx.NodeProto, graph: OnnxGraph, index: int, default: int | None) -> int | None:
    """Value of an optional integer input: `default` if it is absent, None if it is not a constant."""
    name = input_name(node, index)
    if not name:
        return default
    value = graph.constant(name)
    return int(value.reshape(())) if value is not None and value.size == 1 else None
