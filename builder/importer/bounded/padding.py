"""Pad all values whose length is only known at run time, so that the whole graph is static.

Each output of the model that has such a length is padded with zeros, and the length becomes one more output,
whose name says which output and axis it belongs to. `rules` says what each operator does.
"""

from __future__ import annotations

import re
from typing import Final

import onnx
from onnx import TensorProto, helper

from agent.bundle.output_length import OutputLength
from builder.errors import UnboundedError
from builder.importer.bounded.joining import JOIN, join
from builder.importer.bounded.padded_graph import PaddedGraph
from builder.importer.bounded.rules import RULES, SOURCES
from builder.importer.onnx_graph import OnnxGraph, copy_node, subgraphs
from builder.importer.rewrites.branches import write_out

_COUNT: Final = re.compile(r"edgebundle/length/(\d+)/(.+)", re.DOTALL)
# What a rule raises for a node whose inputs or attributes contradict the specification.
_MALFORMED: Final = (ArithmeticError, LookupError, TypeError, ValueError)
# Nodes of a graph with all branches written out.
MAX_NODES: Final = 200_000


def bounded_outputs(model: onnx.ModelProto) -> tuple[OutputLength, ...]:
    """Return the axes of a padded model's outputs whose lengths are outputs, too."""
    names = {value.name for value in model.graph.output}
    found = []
    for value in model.graph.output:
        match = _COUNT.fullmatch(value.name)
        if match is not None and match[2] in names:
            found.append(OutputLength(match[2], int(match[1]), value.name))
    return tuple(found)


def pad_lengths(model: onnx.ModelProto) -> bool:
    """Pad a model in place; return whether it had a length that is only known at run time.

    `model`: a model with static inputs and recorded shapes, with constants folded.
    Raises `UnboundedError` if an operator cannot take such a length, or nothing bounds it; the model is then
        as before.
    """
    graph = OnnxGraph(model)
    if not any(_is_open(node, graph) for node in model.graph.node):
        return False
    weights = len(model.graph.initializer)
    padded = PaddedGraph(model)
    try:
        waiting = list(reversed(model.graph.node))
        for _ in range(MAX_NODES):
            if not waiting:
                break
            node = waiting.pop()
            padded.begin(node)
            try:
                written_out = _pad(node, padded)
            except _MALFORMED:
                padded.refuse("its inputs or attributes contradict the specification")
            waiting += reversed(written_out or [])
        counts = _close(model, padded)
    except UnboundedError:
        del model.graph.initializer[weights:]
        raise
    kept = [copy_node(node) for node in padded.nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    model.graph.output.extend(counts)
    del model.graph.value_info[:]
    return True


def _is_open(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether a node makes a value of unknown length from values of known length."""
    if node.domain or node.op_type not in SOURCES:
        return False
    inputs_known = all(graph.shape_of(name) is not None for name in node.input if name)
    return inputs_known and any(graph.shape_of(name) is None for name in node.output if name)


def _pad(node: onnx.NodeProto, g: PaddedGraph) -> list[onnx.NodeProto] | None:
    """Pad one node; return nodes to pad in its place, if it is a branch that must be written out."""
    follows = any(name in g.lengths or name in g.contents for name in node.input)
    known = all(g.graph.shape_of(name) is not None for name in node.output if name)
    if any(subgraphs(node)):
        if known and not follows:
            g.nodes.append(copy_node(node))
            return None
        return _branches(node, g)
    if node.domain == JOIN:
        join(node, g)
        return None
    if not known and node.op_type not in SOURCES:
        g.learn_types(node)
    if not known and g.fold(node):
        return None
    padded = any(name in g.lengths for name in node.input)
    # Its input's shape may have become known only here.
    follows |= node.op_type in ("Shape", "Size") and not node.domain
    if known and not padded and not (follows and node.op_type in RULES):
        g.nodes.append(copy_node(node))
        return None
    rule = RULES.get(node.op_type) if not node.domain else None
    if rule is not None and (follows or node.op_type in SOURCES):
        rule(node, g)
        for name in node.output:
            g.settle(name)
    elif follows and padded:
        g.refuse("it cannot take a length that is only known at run time")
    else:
        g.copy(node)
    return None


def _branches(node: onnx.NodeProto, g: PaddedGraph) -> list[onnx.NodeProto]:
    """Both branches of an If, and nodes that join what they make."""
    found = write_out(node, g.graph) if node.op_type == "If" and not node.domain else None
    if found is None:
        g.refuse("its condition or length depends on values that are only known at run time")
    pairs = zip(node.output, found.taken, found.other, strict=True)
    joins = [
        helper.make_node(JOIN, [node.input[0], taken, other], [to], name=f"{node.name}/{to}", domain=JOIN)
        for to, taken, other in pairs
        if to
    ]
    return [*found.nodes, *joins]


def _close(model: onnx.ModelProto, g: PaddedGraph) -> list[onnx.ValueInfoProto]:
    """Make the model's own outputs zero behind their ends; return the outputs with their lengths."""
    counts = []
    for value in model.graph.output:
        g.begin(onnx.NodeProto(op_type="output", name=value.name))
        lengths = g.lengths.get(value.name, {})
        if lengths:
            inner = g.graph.fresh(f"{value.name}/padded")
            for node in g.nodes:
                node.output[:] = [inner if name == value.name else name for name in node.output]
                node.input[:] = [inner if name == value.name else name for name in node.input]
            elem_type, shape = g.elem_type(value.name), g.shape(value.name)
            g.graph.set_type(inner, elem_type, shape)
            g.lengths[inner] = lengths
            g.filled(inner, 0, to=value.name)
        for axis, length in lengths.items():
            name = f"edgebundle/length/{axis}/{value.name}"
            g.op("Identity", length.name, to=name)
            counts.append(helper.make_tensor_value_info(name, TensorProto.INT64, [1]))
        value.type.tensor_type.ClearField("shape")
    return counts
