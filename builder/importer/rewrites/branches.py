"""`If` on a value that is only known at run time: compute both branches and select.

Branches have no side effects, and no operator fails at run time, not even a division by zero: so this differs
only in its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from builder.importer.control_flow import inline_body
from builder.importer.onnx_graph import OnnxGraph, attributes, walk_nodes
from builder.importer.rewrites.loops import MAX_UNROLLED_NODES
from builder.importer.rewrites.replacement import Nodes, Replacement


def select_branch(new: Replacement) -> Nodes | None:
    """If whose branches make tensors of equal shapes: both branches, and Where."""
    if new.graph.is_constant(new.inputs[0]) or any(
        new.graph.shape_of(name) is None for name in new.outputs if name
    ):
        return None
    found = write_out(new.node, new.graph)
    if found is None:
        return None
    new.nodes += found.nodes
    condition = new.op("Reshape", new.inputs[0], new.ints())
    for name, taken, other in zip(new.outputs, found.taken, found.other, strict=True):
        if name:
            new.op("Where", condition, taken, other, to=name)
    return new.nodes


@dataclass(frozen=True, slots=True)
class Branches:
    """Both branches of an If, written out.

    `taken`, `other`: what the first and the second branch make, in the order of the If's outputs.
    """

    nodes: list[onnx.NodeProto]
    taken: list[str]
    other: list[str]


def write_out(node: onnx.NodeProto, graph: OnnxGraph) -> Branches | None:
    """Write both branches of an If out; None if they are too large."""
    options = attributes(node)
    branches: list[onnx.GraphProto] = [options["then_branch"], options["else_branch"]]
    if sum(1 for branch in branches for _ in walk_nodes(branch)) > MAX_UNROLLED_NODES:
        return None
    nodes: list[onnx.NodeProto] = []
    made = []
    for branch, scope in zip(branches, ("then", "else"), strict=True):
        names = [graph.fresh(name or "unread") for name in node.output]
        nodes += inline_body(graph, branch, f"{node.name}/{scope}", [], names)
        made.append(names)
    return Branches(nodes, *made)
