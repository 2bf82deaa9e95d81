"""Element-wise operators with attributes or types that the front end ignores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, set_attributes
from builder.importer.rewrites.replacement import Replacement, input_name, output_name

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
# Integers of these types are exact in float32.
_SMALL_INTEGERS: Final = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16}
)

# float32 has all integers up to here.
_WHOLE_IN_FLOAT: Final = 1 << 24


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


def drops_at_random(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether a Dropout or BiasDropout is in training, or may be, and its ratio is not 0."""
    first = 1 if node.op_type == "Dropout" else 3
    ratio, training = (input_name(node, at) for at in (first, first + 1))
    if not training:
        return False
    value, share = graph.constant(training), graph.constant(ratio) if ratio else np.float32(0.5)
    return (value is None or bool(np.any(value))) and (share is None or bool(np.any(share)))


def dropout(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Dropout outside of training: an Identity, and a mask that is all true."""
    if drops_at_random(node, graph):
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
    """Pow of integers or of two types: cast, because the front end wants floats of one type.

    Where float32 does not have all exponents, an odd one could become even.
    """
    base, exponent = (graph.type_of(name) for name in node.input)
    if base is None or exponent is None:
        return None
    if base.elem_type in _FLOATS and exponent.elem_type == base.elem_type:
        return None
    new = Replacement(node, graph)
    working = base.elem_type
    if working not in _FLOATS:
        working = TensorProto.FLOAT if base.elem_type in _SMALL_INTEGERS else TensorProto.DOUBLE
    if exponent.dtype.kind in "iu" and exponent.elem_type not in _SMALL_INTEGERS:
        known = graph.constant(node.input[1])
        if known is None or (np.abs(known.astype(np.float64)) > _WHOLE_IN_FLOAT).any():
            working = TensorProto.DOUBLE
    left = new.cast(node.input[0], working)
    right = new.cast(node.input[1], working)
    new.cast(new.op("Pow", left, right), base.elem_type, to=node.output[0])
    return new.nodes


def prelu(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """PRelu with one constant slope: a LeakyRelu."""
    slope, found = graph.constant(node.input[1]), graph.type_of(node.input[0])
    if slope is None or slope.size != 1 or found is None or found.elem_type != TensorProto.FLOAT:
        return None
    rank = len(graph.shape_of(node.input[0]) or ())
    if slope.ndim > rank:
        return None
    new = Replacement(node, graph)
    new.op("LeakyRelu", node.input[0], to=node.output[0], alpha=float(slope.reshape(())))
    return new.nodes


def clip(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Clip of floats without a bound: the default is the largest finite number, so infinity is clipped."""
    found = graph.type_of(node.input[0])
    bounds = [input_name(node, place) for place in (1, 2)]
    if found is None or found.dtype.kind != "f" or all(bounds):
        return None
    new = Replacement(node, graph)
    largest = np.finfo(found.dtype).max
    low, high = (
        given or new.constant(sign * largest, found.dtype)
        for given, sign in zip(bounds, (-1, 1), strict=True)
    )
    new.op("Clip", node.input[0], low, high, to=node.output[0])
    return new.nodes


def celu(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Celu: ONNX's definition, whose constants of shape [1] would give a scalar a dimension."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    zero, one = (new.constant(number, found.dtype) for number in (0, 1))
    alpha = new.constant(float(attributes(node).get("alpha", 1.0)), found.dtype)
    below = new.op("Mul", alpha, new.op("Sub", new.op("Exp", new.op("Div", node.input[0], alpha)), one))
    new.op("Add", new.op("Max", node.input[0], zero), new.op("Min", below, zero), to=node.output[0])
    return new.nodes


def shrink(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Shrink: what is below the one bound, else above the other, else 0.

    TVM rounds the bounds to integers for integers, and tries them in the other order, which matters if
    `lambd` is negative.
    """
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    is_float, given = found.dtype.kind == "f", attributes(node)
    x = node.input[0] if is_float else new.cast(node.input[0], TensorProto.FLOAT)
    dtype = found.dtype if is_float else np.dtype(np.float32)
    low, high, bias, zero = (
        new.constant(number, dtype)
        for number in (-given.get("lambd", 0.5), given.get("lambd", 0.5), given.get("bias", 0.0), 0)
    )
    above = new.op("Where", new.op("Greater", x, high), new.op("Sub", x, bias), zero)
    chosen = new.op("Less", x, low), new.op("Add", x, bias), above
    if is_float:
        new.op("Where", *chosen, to=node.output[0])
    else:
        new.cast(new.op("Where", *chosen), found.elem_type, to=node.output[0])
    return new.nodes


def squeeze(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Squeeze of an empty list of axes: of all axes whose extent is 1, as in ONNX Runtime."""
    axes = input_name(node, 1)
    given = graph.constant(axes) if axes else None
    if given is None or given.size:
        return None
    new = Replacement(node, graph)
    new.op("Squeeze", node.input[0], to=node.output[0])
    return new.nodes


def thresholded_relu(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ThresholdedRelu: x or 0. TVM multiplies instead, and 0 times infinity is NaN."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    bound = new.constant(float(attributes(node).get("alpha", 1.0)), found.dtype)
    beyond = new.op("Greater", node.input[0], bound)
    new.op("Where", beyond, node.input[0], new.constant(0, found.dtype), to=node.output[0])
    return new.nodes


def sign(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Sign of unsigned integers, for which TVM would need -1: whether they are not zero."""
    found = graph.type_of(node.input[0])
    if found is None or found.dtype.kind != "u":
        return None
    new = Replacement(node, graph)
    new.cast(new.cast(node.input[0], TensorProto.BOOL), found.elem_type, to=node.output[0])
    return new.nodes


def equal(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Equal of booleans, which TVM compares as if they were floats: the opposite of Xor."""
    found = graph.type_of(node.input[0])
    if found is None or found.dtype.kind != "b":
        return None
    new = Replacement(node, graph)
    new.op("Not", new.op("Xor", *node.input), to=node.output[0])
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
    """OptionalHasElement: true for a tensor, false for an absent input or an Optional of nothing."""
    name = input_name(node, 0)
    optional = _optional(node, graph) if name else None
    if name and optional is None and graph.type_of(name) is None:
        return None
    has_element = bool(name if optional is None else input_name(optional, 0))
    value = numpy_helper.from_array(np.array(has_element))
    return [helper.make_node("Constant", [], list(node.output), name=node.name, value=value)]


def optional_get_element(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """OptionalGetElement of a tensor, or of what Optional made of a value: that value."""
    optional = _optional(node, graph)
    if optional is None and graph.type_of(node.input[0]) is None:
        return None
    source = node.input[0] if optional is None else optional.input[0]
    return [helper.make_node("Identity", [source], list(node.output), name=node.name)]


def _optional(node: onnx.NodeProto, graph: OnnxGraph) -> onnx.NodeProto | None:
    """The Optional node that made what a node reads; None if there is none."""
    maker = graph.maker_of(node.input[0])
    while maker is not None and maker.op_type == "Identity":
        maker = graph.maker_of(maker.input[0])
    return maker if maker is not None and maker.op_type == "Optional" else None


def swish(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Swish, and SwiGLU of a gate and a value: x sigmoid(alpha x), times the value."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    alpha = float(attributes(node).get("alpha", 1.0))
    inner = node.input[0] if alpha == 1 else new.op("Mul", node.input[0], new.constant(alpha, found.dtype))
    gate = new.op("Sigmoid", inner)
    if value := input_name(node, 1):
        new.op("Mul", new.op("Mul", node.input[0], gate), value, to=node.output[0])
    else:
        new.op("Mul", node.input[0], gate, to=node.output[0])
    return new.nodes


def sinh(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Sinh: by exponentials where they differ, else by 2 t / (1 - t^2) of t = tanh(x / 2)."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    x, half, one = node.input[0], new.constant(0.5, found.dtype), new.constant(1, found.dtype)
    # Half of the exponent, squared afterwards: exp(x) / 2 overflows later than exp(x).
    grown, fallen = (new.op("Exp", new.op("Mul", each, half)) for each in (x, new.op("Neg", x)))
    squares = [new.op("Mul", new.op("Mul", each, half), each) for each in (grown, fallen)]
    small = new.op("Tanh", new.op("Mul", x, half))
    near = new.op("Div", new.op("Add", small, small), new.op("Sub", one, new.op("Mul", small, small)))
    is_near = new.op("Less", new.op("Abs", x), one)
    new.op("Where", is_near, near, new.op("Sub", *squares), to=node.output[0])
    return new.nodes


def cosh(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Cosh: half the sum of two exponentials."""
    found = graph.type_of(node.input[0])
    if found is None:
        return None
    new = Replacement(node, graph)
    x, half = node.input[0], new.constant(0.5, found.dtype)
    grown, fallen = (new.op("Exp", new.op("Mul", each, half)) for each in (x, new.op("Neg", x)))
    new.op("Add", *(new.op("Mul", new.op("Mul", e, half), e) for e in (grown, fallen)), to=node.output[0])
    return new.nodes


def modulo(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """Mod of floats with the sign of the divisor: fmod, moved by the divisor where the signs differ."""
    found = graph.type_of(node.input[0])
    if found is None or found.elem_type not in _FLOATS or attributes(node).get("fmod", 0):
        return None
    new = Replacement(node, graph)
    divisor = node.input[1]
    rest = new.op("Mod", node.input[0], divisor, fmod=1)
    zero = new.constant(0, found.dtype)
    other = new.op("Xor", *(new.op("Less", each, zero) for each in (rest, divisor)))
    moves = new.op("And", other, new.op("Not", new.op("Equal", rest, zero)))
    new.op("Where", moves, new.op("Add", rest, divisor), rest, to=node.output[0])
    return new.nodes


def bit_shift(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """BitShift by an amount that may lie outside of the type's width: only the sign is then left."""
    found = graph.type_of(node.input[0])
    maker = graph.maker_of(node.input[1])
    if found is None or (maker is not None and maker.name.endswith(_SHIFT_MARK)):
        return None
    width = found.dtype.itemsize * 8
    amount = graph.constant(node.input[1])
    if amount is not None and amount.size and amount.min() >= 0 and amount.max() < width:
        return None
    new = Replacement(node, graph)
    # Compared as INT64: a comparison of bytes has no kernel in ONNX Runtime.
    wide = new.cast(node.input[1], TensorProto.INT64)
    fits = new.op("Less", wide, new.constant(width, np.int64))
    if found.dtype.kind == "i":
        fits = new.op("And", fits, new.op("Not", new.op("Less", wide, new.constant(0, np.int64))))
    zero = new.constant(0, found.dtype)
    shift = new.op("Where", fits, node.input[1], zero)
    new.nodes[-1].name += _SHIFT_MARK
    direction = str(attributes(node)["direction"])
    shifted = new.op("BitShift", node.input[0], shift, direction=direction)
    rest = zero
    if found.dtype.kind == "i" and direction == "RIGHT":
        negative = new.op("Less", node.input[0], zero)
        rest = new.op("Where", negative, new.constant(-1, found.dtype), zero)
    new.op("Where", fits, shifted, rest, to=node.output[0])
    return new.nodes


_SHIFT_MARK: Final = "/in_width"


def reduce_bool(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ReduceMax and ReduceMin of booleans: as bytes."""
    found = graph.type_of(node.input[0])
    if found is None or found.elem_type != TensorProto.BOOL:
        return None
    new = Replacement(node, graph)
    options = attributes(node)
    wide = new.cast(node.input[0], TensorProto.INT32)
    result = new.op(node.op_type, wide, *node.input[1:], **options)
    # Of no elements, the largest and the smallest are the limits of the type.
    new.op("Greater", result, new.constant(0, np.int32), to=node.output[0])
    return new.nodes


def reduce_nothing(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """A reduction of no axes (`noop_with_empty_axes`): only what is done to each number."""
    name, given = input_name(node, 1), attributes(node)
    if given.get("axes") == []:  # of `amax` without axes: all of them, but TVM cannot read it
        without = copy_node(node)
        set_attributes(without, ["axes"], {})
        return [without]
    axes = graph.constant(name) if name else None
    if not given.get("noop_with_empty_axes", 0) or (name and (axes is None or axes.size)):
        return reduce_bool(node, graph) if node.op_type in ("ReduceMax", "ReduceMin") else None
    new, x = Replacement(node, graph), node.input[0]
    match node.op_type:
        case "ReduceL1" | "ReduceL2":
            new.op("Abs", x, to=node.output[0])
        case "ReduceLogSum":
            new.op("Log", x, to=node.output[0])
        case "ReduceSumSquare":
            new.op("Mul", x, x, to=node.output[0])
        case _:
            new.op("Identity", x, to=node.output[0])
    return new.nodes


def reduce_log_sum_exp(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ReduceLogSumExp: the largest number is subtracted, unless it is infinite, as where all are masked."""
    found, shape, given = graph.type_of(node.input[0]), graph.shape_of(node.input[0]), attributes(node)
    known = graph.constant(name) if (name := input_name(node, 1)) else np.array(given.get("axes", []))
    nothing = known is not None and not known.size and given.get("noop_with_empty_axes", 0)
    if found is None or not shape or 0 in shape or found.dtype.kind != "f" or known is None or nothing:
        return reduce_nothing(node, graph)
    axes = sorted({int(axis) % len(shape) for axis in known}) or list(range(len(shape)))
    keep = bool(given.get("keepdims", 1))
    new, x = Replacement(node, graph), node.input[0]
    top = new.reduce("ReduceMax", x, axes, keep=True)
    top = new.op("Where", new.op("IsInf", top), new.constant(0, found.dtype), top)
    total = new.reduce("ReduceSum", new.op("Exp", new.op("Sub", x, top)), axes, keep=keep)
    if not keep:
        top = new.op("Squeeze", top, new.ints(*axes))
    new.op("Add", new.op("Log", total), top, to=node.output[0])
    return new.nodes


def reduce_mean(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """ReduceMean of integers: their sum, divided as integers are."""
    found, shape, given = graph.type_of(node.input[0]), graph.shape_of(node.input[0]), attributes(node)
    known = graph.constant(name) if (name := input_name(node, 1)) else np.array(given.get("axes", []))
    if found is None or shape is None or found.dtype.kind not in "iu" or known is None:
        return reduce_nothing(node, graph)
    if not known.size and given.get("noop_with_empty_axes", 0):
        return reduce_nothing(node, graph)
    axes = sorted({int(axis) % len(shape) for axis in known}) or list(range(len(shape)))
    new = Replacement(node, graph)
    total = new.reduce("ReduceSum", node.input[0], axes, keep=bool(given.get("keepdims", 1)))
    count = int(np.prod([shape[axis] for axis in axes], dtype=np.int64))
    if count < 1:
        return None
    new.op("Div", total, new.constant(count, found.dtype), to=node.output[0])
    return new.nodes
