"""Build the nodes that replace a node, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike
from onnx import helper

from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes

Attribute: TypeAlias = int | float | str | Sequence[int]
Nodes: TypeAlias = Sequence[onnx.NodeProto]

# From this opset on, all reductions take their axes as an input; ReduceSum has done so since 13.
_AXES_ARE_INPUT: Final = 18


class _UnknownTypeError(Exception):
    """The type of a value, or its shape, is not known, so the node that reads it stays as it is."""


class Replacement:
    """A node, what is known about it, and the nodes that replace it.

    `node`: the node to be replaced. New nodes contain its name, so messages still point to it.
    """

    def __init__(self, node: onnx.NodeProto, graph: OnnxGraph) -> None:
        self.node = node
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []

    @property
    def inputs(self) -> Sequence[str]:
        """The names of the node's inputs; of absent ones, empty."""
        inputs: Sequence[str] = self.node.input
        return inputs

    @property
    def outputs(self) -> Sequence[str]:
        """The names of the node's outputs."""
        outputs: Sequence[str] = self.node.output
        return outputs

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes."""
        return attributes(self.node)

    def input(self, index: int) -> str:
        """Name of an optional input, empty if it is absent."""
        return input_name(self.node, index)

    def output(self, index: int) -> str:
        """Name of an optional output, empty if it is absent."""
        return output_name(self.node, index)

    def integer(self, index: int, default: int | None) -> int | None:
        """Value of an optional integer input: `default` if it is absent, None if it is not a constant."""
        return constant_integer(self.node, self.graph, index, default)

    def type_of(self, name: str) -> ValueType:
        """Type of a value; a node whose type is unknown stays as it is."""
        found = self.graph.type_of(name)
        if found is None:
            raise _UnknownTypeError(name)
        return found

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of a value; a node stays as it is if not all of it is known."""
        shape = self.graph.shape_of(name)
        if shape is None:
            raise _UnknownTypeError(name)
        return shape

    def op(self, op_type: str, *inputs: str, to: str = "", **attributes: Attribute) -> str:
        """Add a node with one output and return the output's name: `to`, or a new one."""
        output = to or self.graph.fresh(f"{self.node.name}/{op_type}")
        self._add(op_type, inputs, [output], **attributes)
        return output

    def result(self, op_type: str, *inputs: str, **attributes: Attribute) -> Nodes:
        """Add the node that makes the first output, and return all nodes."""
        self._add(op_type, inputs, [self.outputs[0]], **attributes)
        return self.nodes

    def cast_result(self, x: str, elem_type: int) -> Nodes:
        """Add the Cast that makes the first output, and return all nodes."""
        self.cast(x, elem_type, to=self.outputs[0])
        return self.nodes

    def op_many(self, op_type: str, count: int, *inputs: str, **attributes: Attribute) -> list[str]:
        """Add a node with `count` outputs and return their names."""
        outputs = [self.graph.fresh(f"{self.node.name}/{op_type}") for _ in range(count)]
        self._add(op_type, inputs, outputs, **attributes)
        return outputs

    def _add(self, op_type: str, inputs: Sequence[str], outputs: list[str], **attributes: Attribute) -> None:
        name = f"{self.node.name}/{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), outputs, name=name, **attributes))

    def cast(self, x: str, elem_type: int, to: str = "") -> str:
        """Add a Cast; `op` cannot, because Cast has an attribute called `to`."""
        output = to or self.graph.fresh(f"{self.node.name}/Cast")
        name = f"{self.node.name}/Cast_{len(self.nodes)}"
        self.nodes.append(helper.make_node("Cast", [x], [output], name=name, to=elem_type))
        return output

    def constant(self, values: ArrayLike, dtype: DTypeLike) -> str:
        """Add a weight and return its name."""
        return self.graph.add_constant(np.asarray(values, dtype), f"{self.node.name}/constant")

    def ints(self, *values: int) -> str:
        """Add a weight of INT64, the type of shapes and axes, and return its name."""
        return self.constant(values, np.int64)

    def reduce(self, op_type: str, x: str, axes: Sequence[int], *, keep: bool, to: str = "") -> str:
        """Add a reduction in the form of the model's opset; `keep` keeps reduced axes with extent 1."""
        if self.graph.opset >= _AXES_ARE_INPUT or op_type == "ReduceSum":
            return self.op(op_type, x, self.ints(*axes), to=to, keepdims=int(keep))
        return self.op(op_type, x, to=to, axes=list(axes), keepdims=int(keep))


# Returns the nodes that replace a node, or None to keep it.
Rewrite: TypeAlias = Callable[[Replacement], Nodes | None]


# Raised by a rewrite of a node whose inputs or attributes contradict the specification. The node stays, and
# ONNX's own strict inference explains what is wrong with it. If it finds nothing, the rewrite is wrong.
_MALFORMED: Final = (ArithmeticError, LookupError, TypeError, ValueError)


def rewritten(
    rewrite: Rewrite, node: onnx.NodeProto, graph: OnnxGraph, failed: list[str] | None = None
) -> list[onnx.NodeProto] | None:
    """Return the nodes that a rewrite puts in the place of a node, None if it keeps the node.

    `failed`: receives a line if the rewrite failed, so that the node stays as it is.
    """
    try:
        new = rewrite(Replacement(node, graph))
    except _UnknownTypeError:
        return None
    except _MALFORMED as error:
        if failed is not None:
            reason = (str(error).splitlines() or [""])[0]
            failed.append(f"{node.op_type} '{node.name:.60}' ({type(error).__name__}: {reason:.80})")
        return None
    return None if new is None else list(new)


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
