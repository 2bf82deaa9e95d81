"""Control flow that is none: an `If` whose condition is a constant becomes the branch that it takes."""

from __future__ import annotations

import onnx
from onnx import helper

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, subgraphs, walk_nodes


def inline_constant_ifs(model: onnx.ModelProto) -> int:
    """Replace each `If` on a constant by its branch, in place.

    Returns
    -------
    int
        How many were replaced. Branches may hold further ones: fold constants and call again.
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
    """Nodes of a subgraph, to stand in the graph around it.

    Parameters
    ----------
    graph
        The graph around it; gets the subgraph's weights.
    body
        The subgraph. Every value in it gets a name that is new in `graph`.
    scope
        Prefix of the new names of nodes.
    inputs
        Names in `graph` of the values for the subgraph's inputs.
    outputs
        Names in `graph` that the subgraph's outputs shall have.
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
    # One value may leave through two outputs, or pass through untouched: an Identity serves all cases, and
    # folds.
    for inner, outer in zip(body.output, outputs, strict=True):
        if outer:
            source = names.get(inner.name, inner.name)
            nodes.append(helper.make_node("Identity", [source], [outer], name=f"{scope}/{outer}"))
    return nodes


def rename(node: onnx.NodeProto, names: dict[str, str]) -> None:
    """Rename the values that a node reads and makes, and those its subgraphs read from outside."""
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
                # An outer value handed out: graph outputs need a maker inside.
                inner_name = f"{visible[output.name]}__out"
                subgraph.node.append(helper.make_node("Identity", [visible[output.name]], [inner_name]))
                output.name = inner_name


def has_control_flow(model: onnx.ModelProto) -> bool:
    """Whether any operator still holds a subgraph."""
    return any(any(subgraphs(node)) for node in walk_nodes(model.graph))
