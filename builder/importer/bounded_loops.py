"""Bound Loops whose number of steps is only known at run time by the largest number that the user names.

Such a Loop gets that number as its trip count, and a condition that is false after its own end. The rewrite
of Loop then unrolls it, and steps after the end change nothing. Where more steps would follow the last one,
float results become NaN: an incomplete result must not look like a complete one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.errors import ModelError
from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes, copy_node
from builder.importer.rewrites.loops import MAX_UNROLLED_NODES, is_too_long, stays_true
from builder.importer.rewrites.replacement import Replacement, input_name

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})


def bound_loops(model: onnx.ModelProto, most: int) -> list[str]:
    """Bound every Loop of a graph, but not of its subgraphs, in place.

    `model`: the model, with inferred types.
    Raises `ModelError` if a Loop with so many steps has too many nodes.
    """
    graph = OnnxGraph(model)
    found: list[str] = []

    def replace(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "Loop" or node.domain or not _is_open(node, graph):
            return None
        if is_too_long(node, most):
            size = len(attributes(node)["body"].node)
            fitting = MAX_UNROLLED_NODES // size
            raise ModelError(
                f"loop '{node.name[:80]}': expected at most {fitting} steps of its {size} nodes, got {most}",
                hint=f"give fewer: --max-iterations {fitting}" if fitting else "make the loop's body smaller",
            )
        found.append(node.name)
        return _bounded(node, graph, most)

    graph.rewrite(replace)
    return found


def _is_open(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether the number of steps is unknown: not constant, or so large that only the condition counts."""
    name = input_name(node, 0)
    trips = graph.constant(name) if name else None
    if trips is None or trips.size != 1:
        return True
    return is_too_long(node, int(trips.reshape(()))) and not stays_true(node, graph)


def _bounded(node: onnx.NodeProto, graph: OnnxGraph, most: int) -> list[onnx.NodeProto]:
    new = Replacement(node, graph)
    body = onnx.GraphProto()
    body.CopyFrom(attributes(node)["body"])
    trips, start = input_name(node, 0), input_name(node, 1)
    scalar = new.ints()
    goes_on = new.op("Reshape", start, scalar) if start else new.constant(True, np.bool_)
    ends = new.op("Reshape", body.output[0].name, scalar)
    inner = [new.nodes.pop()]
    if trips:
        count = new.op("Reshape", trips, scalar)
        goes_on = new.op("And", goes_on, new.op("Less", new.constant(0, np.int64), count))
        outer = len(new.nodes)
        step = new.op("Add", body.input[0].name, new.constant(1, np.int64))
        ends = new.op("And", ends, new.op("Less", step, count))
        inner += new.nodes[outer:]
        del new.nodes[outer:]
    # The condition is also a state, so that its last value is known.
    state, last = graph.fresh(f"{node.name}/goes_on"), graph.fresh(f"{node.name}/more")
    inner.append(helper.make_node("Identity", [ends], [last], name=f"{node.name}/more"))
    body.node.extend(inner)
    body.output[0].CopyFrom(helper.make_tensor_value_info(ends, TensorProto.BOOL, []))
    carried = len(node.input) - 2
    outputs = list(body.output)
    states = [*body.input, helper.make_tensor_value_info(state, TensorProto.BOOL, [])]
    outputs.insert(1 + carried, helper.make_tensor_value_info(last, TensorProto.BOOL, []))
    copies = [[_copied(value) for value in values] for values in (states, outputs)]
    del body.input[:], body.output[:]
    body.input.extend(copies[0])
    body.output.extend(copies[1])
    loop = copy_node(node)
    more = graph.fresh(f"{node.name}/cut")
    names = [*node.output, *[""] * (carried - len(node.output))]
    kinds = {name: graph.type_of(name) for name in names if name}
    whole = {name: graph.fresh(f"{name}/whole") for name, kind in kinds.items() if _is_float(kind)}
    made = [whole.get(name, name) for name in names]
    del loop.input[:], loop.output[:], loop.attribute[:]
    loop.input.extend([new.constant(most, np.int64), goes_on, *node.input[2:], goes_on])
    loop.output.extend([*made[:carried], more, *made[carried:]])
    loop.attribute.append(helper.make_attribute("body", body))
    new.nodes.append(loop)
    for name, value in whole.items():
        kind = kinds[name]
        assert kind is not None
        new.op("Where", more, new.constant(np.nan, kind.dtype), value, to=name)
    return new.nodes


def _is_float(kind: ValueType | None) -> bool:
    return kind is not None and kind.elem_type in _FLOATS


def _copied(value: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto()
    copy.CopyFrom(value)
    return copy
