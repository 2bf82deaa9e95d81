"""Unroll Loop and Scan with a known number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx

from builder.importer.control_flow import inline_body
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement, input_name

# Limits the nodes of an unrolled loop: a body of 20 nodes may run 500 times.
MAX_UNROLLED_NODES: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Row:
    """A stacked output of a loop.

    Attributes
    ----------
    values
        The value that each step made.
    axis
        The axis along which they are stacked.
    """

    values: list[str]
    axis: int


def unroll_loop(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Unroll a Loop with a constant trip count that never ends early."""
    body: onnx.GraphProto = attributes(node)["body"]
    trips = graph.constant(node.input[0]) if node.input[0] else None
    if trips is None or trips.size != 1 or not _stays_true(node, graph, body):
        return None
    count = int(trips.reshape(()))
    if count < 1 or count * len(body.node) > MAX_UNROLLED_NODES:
        return None
    carried = list(node.input[2:])
    scanned = len(body.output) - 1 - len(carried)
    new = Replacement(node, graph)
    condition = new.constant(True, np.bool_)
    rows: list[list[str]] = [[] for _ in range(scanned)]
    for step in range(count):
        outputs = [graph.fresh(output.name) for output in body.output]
        index = new.constant(step, np.int64)
        new.nodes += inline_body(graph, body, f"{node.name}/{step}", [index, condition, *carried], outputs)
        carried = outputs[1 : 1 + len(carried)]
        for row, value in zip(rows, outputs[1 + len(carried) :], strict=True):
            row.append(value)
    _make_outputs(new, node.output, carried, [_Row(row, 0) for row in rows])
    return new.nodes


def _stays_true(node: onnx.NodeProto, graph: OnnxGraph, body: onnx.GraphProto) -> bool:
    """Whether a Loop's condition is true at the start, and the body passes it on or sets it to true."""
    if name := input_name(node, 1):
        start = graph.constant(name)
        if start is None or not bool(start.reshape(())):
            return False
    makers = {name: maker for maker in body.node for name in maker.output}
    weights = {tensor.name: tensor for tensor in body.initializer}
    name = body.output[0].name
    while (maker := makers.get(name)) is not None and maker.op_type == "Identity":
        name = maker.input[0]
    if name == body.input[1].name:
        return True
    if name in weights:
        return bool(onnx.numpy_helper.to_array(weights[name]).reshape(()))
    if maker is not None and maker.op_type == "Constant" and maker.attribute[0].name == "value":
        return bool(onnx.numpy_helper.to_array(maker.attribute[0].t).reshape(()))
    outer = graph.constant(name)
    return outer is not None and bool(outer.reshape(()))


def unroll_scan(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Unroll a Scan over inputs of known length."""
    options = attributes(node)
    body: onnx.GraphProto = options["body"]
    scans = int(options["num_scan_inputs"])
    carried, read = list(node.input[: len(node.input) - scans]), list(node.input[len(node.input) - scans :])
    made = len(body.output) - len(carried)
    axes_in = list(options.get("scan_input_axes", [0] * scans))
    axes_out = list(options.get("scan_output_axes", [0] * made))
    back_in = list(options.get("scan_input_directions", [0] * scans))
    back_out = [bool(direction) for direction in options.get("scan_output_directions", [0] * made)]
    shapes = [graph.shape_of(name) for name in read]
    if not read or any(shape is None for shape in shapes) or "" in carried:
        return None
    count = (shapes[0] or ())[axes_in[0]]
    if count < 1 or count * len(body.node) > MAX_UNROLLED_NODES:
        return None
    new = Replacement(node, graph)
    rows: list[list[str]] = [[] for _ in range(made)]
    for step in range(count):
        slices = []
        for name, axis, backwards in zip(read, axes_in, back_in, strict=True):
            index = new.constant(count - 1 - step if backwards else step, np.int64)
            slices.append(new.op("Gather", name, index, axis=axis))
        outputs = [graph.fresh(output.name) for output in body.output]
        new.nodes += inline_body(graph, body, f"{node.name}/{step}", [*carried, *slices], outputs)
        carried = outputs[: len(carried)]
        for row, value in zip(rows, outputs[len(carried) :], strict=True):
            row.append(value)
    stacked = [
        _Row(row[::-1] if backwards else row, axis)
        for row, axis, backwards in zip(rows, axes_out, back_out, strict=True)
    ]
    _make_outputs(new, node.output, carried, stacked)
    return new.nodes


def _make_outputs(
    new: Replacement,
    names: Sequence[str],
    carried: list[str],
    rows: list[_Row],
) -> None:
    """Add the nodes that make the loop's outputs: its final states, then its stacked rows."""
    for name, value in zip(names, carried, strict=False):
        if name:
            new.op("Identity", value, to=name)
    for name, row in zip(names[len(carried) :], rows, strict=False):
        if name:
            parts = [new.op("Unsqueeze", value, new.ints(row.axis)) for value in row.values]
            new.op("Concat", *parts, to=name, axis=row.axis)
