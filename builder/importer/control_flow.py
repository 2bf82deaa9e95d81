"""Resolve constant control flow: replace an `If` on a constant by the branch that it takes."""

from __future__ import annotations

import onnx
from onnx import helper

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, subgraphs, walk_nodes


def inline_constant_ifs(model: onnx.ModelProto) -> int:
    """Replace each `If` on a constant by its branch, in place.

    Result: how many were replaced. Branches may contain others: fold constants and call this again.
    """
    graph = OnnxGraph(model)

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "If" or node.domain:
            return None
        condition = graph.constant(node.input[0])
        if condition is None or condition.size != 1:
            return None
        branch = attributes(node)["then_branch" if bool(condition.reshape(())) else "else_branch"]
        return inline_body(graph, branch, node.name, [], list(node.output))

    return graph.rewrite(replace)


def inline_body(
    graph: OnnxGraph, body: onnx.GraphProto, scope: str, inputs: list[str], outputs: list[str]
) -> list[onnx.NodeProto]:
    """Copy the nodes of a subgraph for insertion into the graph around it.

    `graph`: the graph around it; the subgraph's weights are added to it.
    `body`: the subgraph. Every value in it gets a name that is new in `graph`.
    `scope`: prefix of the nodes' new names.
    `inputs`: names in `graph` of the values for the subgraph's inputs.
    `outputs`: names in `graph` for the subgraph's outputs; an empty name means that the output is not needed.
    """
    names = dict(zip((value.name for value in body.input), inputs, strict=True))
    for tensor in body.initializer:
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        copy.name = names[tensor.name] = graph.fresh(tensor.name)
        graph.set_initializer(copy)
    for node in body.node:
        names.update({name: graph.fresh(name) for name in node.output if name})
    nodes = []
    for index, node in enumerate(body.node):
        copy = copy_node(node)
        copy.name = f"{scope}/{node.name or f'{node.op_type}_{index}'}"
        rename(copy, names)
        nodes.append(copy)
    # A value may be returned twice, or an input unchanged: an Identity covers all cases and is folded later.
    for inner, outer in zip(body.output, outputs, strict=True):
        if outer:
            source = names.get(inner.name, inner.name)
            nodes.append(helper.make_node("Identity", [source], [outer], name=f"{scope}/{outer}"))
    return nodes


def rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Rename the values that a node reads and makes, including those that its subgraphs read from outside."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for subgraph in subgraphs(node):
        own = {value.name for value in subgraph.input} | {tensor.name for tensor in subgraph.initializer}
        own |= {name for inner in subgraph.node for name in inner.output}
        visible = {old: new for old, new in names.items() if old not in own}
        for inner in subgraph.node:
            rename(inner, visible)
        for output in subgraph.output:
            if output.name in visible:
                # The subgraph returns an outer value, but its outputs must be made inside it.
                inner_name = f"{visible[output.name]}__out"
                subgraph.node.append(helper.make_node("Identity", [visible[output.name]], [inner_name]))
                output.name = inner_name


def has_control_flow(model: onnx.ModelProto) -> bool:
    """Whether any operator contains a subgraph."""
    return any(any(subgraphs(node)) for node in walk_nodes(model.graph))
