"""Element-wise operators with attributes or types that the front end ignores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.replacement import Replacement, input_name, output_name

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
# Integers of these types are exact in float32.
_SMALL_INTEGERS: Final = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16}
)


def cast(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Cast to the type that the input has: an Identity."""
    found = graph.type_of(node.input[0])
    if found is None or found.elem_type != attributes(node)["to"]:
        return None
    return [helper.make_node("Identity", list(node.input), list(node.output), name=node.name)]


def cast_like(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """CastLike: a Cast to the other input's type."""
    like = graph.type_of(node.input[1])
    if like is None:
        return None
    # `saturate` and `round_mode` are for float8, which only newer forms of Cast have.
    options = {name: value for name, value in attributes(node).items() if name in ("saturate", "round_mode")}
    return [
        helper.make_node(
            "Cast", [node.input[0]], list(node.output), name=node.name, to=like.elem_type, **options
        )
    ]


def dropout(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Dropout outside of training: an Identity, and a mask that is all true."""
    training = input_name(node, 2)
    if training:
        value = graph.constant(training)
        if value is None or bool(value.reshape(())):
            return None
    new = Replacement(node, graph)
    if mask := output_name(node, 1):
        shape = graph.shape_of(node.input[0])
        if shape is None:
            return None
        new.op("Expand", new.constant(True, np.bool_), new.ints(*shape), to=mask)
    new.op("Identity", node.input[0], to=node.output[0])
    return new.nodes


def power(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Pow of integers or of two types: cast, because the front end wants floats of one type."""
    base, exponent = (graph.type_of(name) for name in node.input)
    if base is None or exponent is None:
        return None
    if base.elem_type in _FLOATS and exponent.elem_type == base.elem_type:
        return None
    new = Replacement(node, graph)
    working = base.elem_type
    if working not in _FLOATS:
        working = TensorProto.FLOAT if base.elem_type in _SMALL_INTEGERS else TensorProto.DOUBLE
    left = new.cast(node.input[0], working)
    right = new.cast(node.input[1], working)
    new.cast(new.op("Pow", left, right), base.elem_type, to=node.output[0])
    return new.nodes


def is_inf(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """IsInf for only one sign: a comparison with that infinity."""
    options = attributes(node)
    positive, negative = (bool(options.get(f"detect_{sign}", 1)) for sign in ("positive", "negative"))
    found = graph.type_of(node.input[0])
    if found is None or (positive and negative):
        return None
    new = Replacement(node, graph)
    # With neither sign, a comparison that is never true.
    bound = np.inf if positive else -np.inf if negative else np.nan
    new.op("Equal", node.input[0], new.constant(bound, found.dtype), to=node.output[0])
    return new.nodes


def eye_like(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """EyeLike: a constant, because it depends only on a shape."""
    found = graph.type_of(node.input[0])
    shape = graph.shape_of(node.input[0])
    if found is None or shape is None or len(shape) != 2:
        return None
    options = attributes(node)
    dtype = helper.tensor_dtype_to_np_dtype(options.get("dtype", found.elem_type))
    values = np.eye(*shape, k=options.get("k", 0), dtype=dtype)
    return [
        helper.make_node(
            "Constant", [], list(node.output), name=node.name, value=numpy_helper.from_array(values)
        )
    ]


def optional_has_element(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """OptionalHasElement: true for a tensor, false for an absent input."""
    name = input_name(node, 0)
    if name and graph.type_of(name) is None:
        return None
    value = numpy_helper.from_array(np.array(bool(name)))
    return [helper.make_node("Constant", [], list(node.output), name=node.name, value=value)]


def optional_get_element(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """OptionalGetElement of a tensor: that tensor."""
    if graph.type_of(node.input[0]) is None:
        return None
    return [helper.make_node("Identity", list(node.input), list(node.output), name=node.name)]
