"""Unroll Loop and Scan with a known number of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.importer.constant_folding import fold_constants
from builder.importer.control_flow import inline_body
from builder.importer.onnx_graph import OnnxGraph, ValueType, attributes, reads, value_type
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name

# Limits the nodes of an unrolled loop: a body of 20 nodes may run 500 times.
MAX_UNROLLED_NODES: Final = 10_000
# Constants up to this size are given to the inference of types: shapes and axes.
_SMALL: Final = 64


@dataclass(frozen=True, slots=True)
class _Row:
    """A stacked output of a loop."""

    values: list[str]
    axis: int


def unroll_loop(new: Replacement) -> Nodes | None:
    """Unroll a Loop with a constant trip count, which may end early."""
    body: onnx.GraphProto = new.attributes["body"]
    trips = new.graph.constant(new.inputs[0]) if new.inputs[0] else None
    if trips is None or trips.size != 1:
        return None
    count = int(trips.reshape(()))
    if count < 1:
        return _no_steps(new, body)
    if is_too_long(new.node, count):
        return None
    if not stays_true(new.node, new.graph):
        return _unroll_while(new, body, count)
    carried = list(new.inputs[2:])
    scanned = len(body.output) - 1 - len(carried)
    condition = new.constant(True, np.bool_)
    rows: list[list[str]] = [[] for _ in range(scanned)]
    for step in range(count):
        outputs = [new.graph.fresh(output.name) for output in body.output]
        index = _number(new, body, step)
        new.nodes += inline_body(
            new.graph, body, f"{new.node.name}/{step}", [index, condition, *carried], outputs
        )
        carried = outputs[1 : 1 + len(carried)]
        for row, value in zip(rows, outputs[1 + len(carried) :], strict=True):
            row.append(value)
    _make_outputs(new, new.outputs, carried, [_Row(row, 0) for row in rows])
    return new.nodes


def _number(new: Replacement, body: onnx.GraphProto, step: int) -> str:
    """The number of a step: a scalar, or one element if so declared, as PyTorch writes `tensor_split`."""
    declared = value_type(body.input[0])
    return new.constant([step] if declared is not None and declared.shape else step, np.int64)


def _no_steps(new: Replacement, body: onnx.GraphProto) -> Nodes | None:
    """A Loop of no steps: its states as they are, and no rows."""
    carried = list(new.inputs[2:])
    for name, value in zip(new.outputs, carried, strict=False):
        if name:
            new.op("Identity", value, to=name)
    for name, row in zip(new.outputs[len(carried) :], body.output[1 + len(carried) :], strict=False):
        found = value_type(row)
        if not name:
            continue
        if found is None or found.static_shape is None:
            return None
        empty = np.zeros((0, *found.static_shape), found.dtype)
        new.op("Identity", new.constant(empty, found.dtype), to=name)
    return new.nodes


def _unroll_while(new: Replacement, body: onnx.GraphProto, count: int) -> Nodes | None:
    """Unroll a Loop that may end early: all steps are computed, and those after the end change nothing.

    The rows of stacked outputs are selected by Compress, whose length is only known at run time.
    """
    carried = list(new.inputs[2:])
    kinds = [new.graph.type_of(name) for name in carried]
    if any(kind is None or kind.static_shape is None for kind in kinds):
        return None
    scanned = len(body.output) - 1 - len(carried)
    start = new.input(1)
    active = new.op("Reshape", start, new.ints()) if start else new.constant(True, np.bool_)
    rows: list[list[str]] = [[] for _ in range(scanned)]
    steps: list[str] = []
    every: list[str] = []  # what each step makes of the states
    for step in range(count):
        outputs = [new.graph.fresh(output.name) for output in body.output]
        index = _number(new, body, step)
        new.nodes += inline_body(
            new.graph, body, f"{new.node.name}/{step}", [index, active, *carried], outputs
        )
        made = outputs[1 : 1 + len(carried)]
        if step == 0 and _types_of(new.nodes, made, new.graph) != kinds:
            return None
        every += made
        carried = [
            _kept(new, active, value, old, is_bool=kind is not None and kind.elem_type == TensorProto.BOOL)
            for value, old, kind in zip(made, carried, kinds, strict=True)
        ]
        for row, value in zip(rows, outputs[1 + len(made) :], strict=True):
            row.append(new.op("Unsqueeze", value, new.ints(0)))
        steps.append(new.op("Reshape", active, new.ints(1)))
        active = new.op("And", active, new.op("Reshape", outputs[0], new.ints()))
    # A later step may have another shape, such as a slice that begins after the end of a tensor.
    if count > 1 and _types_of(new.nodes, every, new.graph) != kinds * count:
        return None
    for name, value in zip(new.outputs, carried, strict=False):
        if name:
            new.op("Identity", value, to=name)
    done = new.op("Concat", *steps, axis=0)
    for name, row in zip(new.outputs[len(carried) :], rows, strict=False):
        if name:
            new.op("Compress", new.op("Concat", *row, axis=0), done, to=name, axis=0)
    return new.nodes


def _types_of(
    nodes: Sequence[onnx.NodeProto], names: Sequence[str], graph: OnnxGraph
) -> list[ValueType | None]:
    """Types of values that some nodes make from values of the graph."""
    inner = {name for node in nodes for name in node.output}
    shell = onnx.ModelProto(ir_version=graph.model.ir_version, opset_import=graph.model.opset_import)
    shell.graph.name = "step"
    shell.graph.node.extend(nodes)
    for name in sorted({name for node in nodes for name in reads(node)} - inner):
        found, value = graph.type_of(name), graph.constant(name)
        if value is not None and value.size <= _SMALL:
            shell.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        elif found is not None:
            shell.graph.input.append(helper.make_tensor_value_info(name, found.elem_type, found.shape))
    shell.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    # Fold constants first: a shape may be computed from the number of the step.
    fold_constants(shell, strict=False)
    infos = {info.name: value_type(info) for info in shell.graph.output}
    return [infos.get(name) for name in names]


def _kept(new: Replacement, active: str, value: str, old: str, *, is_bool: bool) -> str:
    """The state after a step, unchanged once the loop has ended. ONNX Runtime's Where takes no booleans."""
    if not is_bool:
        return new.op("Where", active, value, old)
    changed = new.op("And", active, value)
    return new.op("Or", changed, new.op("And", new.op("Not", active), old))


def is_too_long(node: onnx.NodeProto, count: int) -> bool:
    """Whether a Loop with `count` steps would become too many nodes."""
    return count * len(attributes(node)["body"].node) > MAX_UNROLLED_NODES


def stays_true(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether a Loop's condition is true at the start, and the body passes it on or sets it to true."""
    body: onnx.GraphProto = attributes(node)["body"]
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


def unroll_scan(new: Replacement) -> Nodes | None:
    """Unroll a Scan over inputs of known length."""
    options = new.attributes
    body: onnx.GraphProto = options["body"]
    scans = int(options["num_scan_inputs"])
    carried, read = list(new.inputs[: len(new.inputs) - scans]), list(new.inputs[len(new.inputs) - scans :])
    made = len(body.output) - len(carried)
    axes_in = list(options.get("scan_input_axes", [0] * scans))
    axes_out = list(options.get("scan_output_axes", [0] * made))
    back_in = list(options.get("scan_input_directions", [0] * scans))
    back_out = [bool(direction) for direction in options.get("scan_output_directions", [0] * made)]
    shapes = [new.graph.shape_of(name) for name in read]
    if not read or any(shape is None for shape in shapes) or "" in carried:
        return None
    count = (shapes[0] or ())[axes_in[0]]
    if count < 1 or count * len(body.node) > MAX_UNROLLED_NODES:
        return None
    rows: list[list[str]] = [[] for _ in range(made)]
    for step in range(count):
        slices = []
        for name, axis, backwards in zip(read, axes_in, back_in, strict=True):
            index = new.constant(count - 1 - step if backwards else step, np.int64)
            slices.append(new.op("Gather", name, index, axis=axis))
        outputs = [new.graph.fresh(output.name) for output in body.output]
        new.nodes += inline_body(new.graph, body, f"{new.node.name}/{step}", [*carried, *slices], outputs)
        carried = outputs[: len(carried)]
        for row, value in zip(rows, outputs[len(carried) :], strict=True):
            row.append(value)
    stacked = [
        _Row(row[::-1] if backwards else row, axis)
        for row, axis, backwards in zip(rows, axes_out, back_out, strict=True)
    ]
    _make_outputs(new, new.outputs, carried, stacked)
    return new.nodes


def _make_outputs(new: Replacement, names: Sequence[str], carried: list[str], rows: list[_Row]) -> None:
    """Add the nodes that make the loop's outputs: its final states, then its stacked rows."""
    for name, value in zip(names, carried, strict=False):
        if name:
            new.op("Identity", value, to=name)
    for name, row in zip(names[len(carried) :], rows, strict=False):
        if name:
            parts = [new.op("Unsqueeze", value, new.ints(row.axis)) for value in row.values]
            new.op("Concat", *parts, to=name, axis=row.axis)
