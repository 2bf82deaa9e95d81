"""Give the outputs of a padded model larger capacities, so that they are equal at all sizes of its inputs.

A capacity follows the inputs by a rule of the operator, such as the smaller of two numbers; what is behind a
count is zero in any case. So a model that is compiled at several sizes pads its outputs to the capacities of
the largest, and none of them needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
from onnx import helper, numpy_helper

from agent.bundle.output_length import OutputLength
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ShapeError
from builder.importer.onnx_graph import OnnxGraph
from builder.importer.onnx_import import ImportedModel
from builder.importer.relax_module import to_relax

Capacities = Mapping[OutputLength, int]


def capacities(model: ImportedModel) -> Capacities:
    """Return the capacity of each axis of an output whose length is only known at run time."""
    shapes = {spec.name: spec.shape for spec in model.outputs}
    return {length: shapes[length.output][length.axis] for length in model.lengths}


def widened(model: ImportedModel, wanted: Capacities) -> ImportedModel:
    """Return a model whose outputs have the wanted capacities.

    Parameters
    ----------
    model
        The model.
    wanted
        What `capacities` returned for the same model at its largest size. Larger capacities stay.

    Raises
    ------
    ShapeError
        If other outputs have such a length at this size.
    """
    if odd := set(model.lengths) ^ wanted.keys():
        name = min(length.output for length in odd)
        raise ShapeError(
            f"output '{name}': its length is only known at run time at some sizes of the inputs, "
            "and follows from them at others",
            hint="narrow the bounds in --input-shapes",
        )
    missing = {spec.name: room for spec in model.outputs if any(room := _room(spec, wanted))}
    if not missing:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model.onnx)
    graph = OnnxGraph(copy)
    for value in copy.graph.output:
        if value.name in missing:
            _widen(copy.graph, graph, value, missing[value.name])
    relax = to_relax(copy)
    return replace(model, mod=relax.mod, outputs=relax.outputs, onnx=copy)


def _room(spec: TensorSpec, wanted: Capacities) -> list[int]:
    """Return how much each axis of an output must grow."""
    capacity = {length.axis: size for length, size in wanted.items() if length.output == spec.name}
    return [max(0, capacity.get(axis, 0) - size) for axis, size in enumerate(spec.shape)]


def _widen(model: onnx.GraphProto, graph: OnnxGraph, value: onnx.ValueInfoProto, room: Sequence[int]) -> None:
    tensor = value.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    name = graph.fresh(f"{value.name}/narrow")
    for node in model.node:
        node.output[:] = [name if each == value.name else each for each in node.output]
        node.input[:] = [name if each == value.name else each for each in node.input]
    narrow = onnx.ValueInfoProto()
    narrow.CopyFrom(value)
    narrow.name = name
    model.value_info.append(narrow)
    axes = [axis for axis, more in enumerate(room) if more]
    for axis in axes:
        zeros = list(shape)
        zeros[axis] = room[axis]
        shape[axis] += room[axis]
        weight = graph.fresh(f"{value.name}/room")
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        model.initializer.append(numpy_helper.from_array(np.zeros(zeros, dtype), weight))
        wide = value.name if axis == axes[-1] else graph.fresh(f"{value.name}/wide")
        model.node.append(
            helper.make_node("Concat", [name, weight], [wide], name=f"{wide}/Concat", axis=axis)
        )
        if axis != axes[-1]:
            model.value_info.append(helper.make_tensor_value_info(wide, tensor.elem_type, shape))
        name = wide
    value.CopyFrom(helper.make_tensor_value_info(value.name, tensor.elem_type, shape))
