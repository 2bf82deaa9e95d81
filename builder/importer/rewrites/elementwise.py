"""Element-wise operators with attributes or types that the front end ignores."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from builder.importer.onnx_graph import OnnxGraph, copy_node, set_attributes
from builder.importer.rewrites.replacement import Nodes, Replacement, input_name

_FLOATS: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16})
# Integers of these types are exact in float32.
_SMALL_INTEGERS: Final = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16}
)

# float32 has all integers up to here.
_WHOLE_IN_FLOAT: Final = 1 << 24


def cast(new: Replacement) -> Nodes | None:
    """Cast to the type that the input has: an Identity."""
    found = new.type_of(new.inputs[0])
    if found.elem_type != new.attributes["to"]:
        return None
    return new.result("Identity", new.inputs[0])


def cast_like(new: Replacement) -> Nodes | None:
    """CastLike: a Cast to the other input's type."""
    like = new.type_of(new.inputs[1])
    # `saturate` and `round_mode` are for float8, which only newer forms of Cast have.
    options = {name: value for name, value in new.attributes.items() if name in ("saturate", "round_mode")}
    return [
        helper.make_node(
            "Cast", [new.inputs[0]], list(new.outputs), name=new.node.name, to=like.elem_type, **options
        )
    ]


def drops_at_random(node: onnx.NodeProto, graph: OnnxGraph) -> bool:
    """Whether a Dropout is in training, or may be, and its ratio is not 0."""
    ratio, training = (input_name(node, at) for at in (1, 2))
    if not training:
        return False
    value, share = graph.constant(training), graph.constant(ratio) if ratio else np.float32(0.5)
    return (value is None or bool(np.any(value))) and (share is None or bool(np.any(share)))


def dropout(new: Replacement) -> Nodes | None:
    """Dropout outside of training: an Identity, and a mask that is all true."""
    if drops_at_random(new.node, new.graph):
        return None
    if mask := new.output(1):
        shape = new.graph.shape_of(new.inputs[0])
        if shape is None:
            return None
        new.op("Expand", new.constant(True, np.bool_), new.ints(*shape), to=mask)
    return new.result("Identity", new.inputs[0])


def power(new: Replacement) -> Nodes | None:
    """Pow of integers or of two types: cast, because the front end wants floats of one type.

    Where float32 does not have all exponents, an odd one could become even.
    """
    base, exponent = (new.graph.type_of(name) for name in new.inputs)
    if base is None or exponent is None:
        return None
    if base.elem_type in _FLOATS and exponent.elem_type == base.elem_type:
        return None
    working = base.elem_type
    if working not in _FLOATS:
        working = TensorProto.FLOAT if base.elem_type in _SMALL_INTEGERS else TensorProto.DOUBLE
    if exponent.dtype.kind in "iu" and exponent.elem_type not in _SMALL_INTEGERS:
        known = new.graph.constant(new.inputs[1])
        if known is None or (np.abs(known.astype(np.float64)) > _WHOLE_IN_FLOAT).any():
            working = TensorProto.DOUBLE
    left = new.cast(new.inputs[0], working)
    right = new.cast(new.inputs[1], working)
    return new.cast_result(new.op("Pow", left, right), base.elem_type)


def prelu(new: Replacement) -> Nodes | None:
    """PRelu with one constant slope: a LeakyRelu."""
    slope, found = new.graph.constant(new.inputs[1]), new.type_of(new.inputs[0])
    if slope is None or slope.size != 1 or found.elem_type != TensorProto.FLOAT:
        return None
    rank = len(new.graph.shape_of(new.inputs[0]) or ())
    if slope.ndim > rank:
        return None
    return new.result("LeakyRelu", new.inputs[0], alpha=float(slope.reshape(())))


def clip(new: Replacement) -> Nodes | None:
    """Clip of floats without a bound: the default is the largest finite number, so infinity is clipped."""
    found = new.type_of(new.inputs[0])
    bounds = [new.input(place) for place in (1, 2)]
    if found.dtype.kind != "f" or all(bounds):
        return None
    largest = np.finfo(found.dtype).max
    low, high = (
        given or new.constant(sign * largest, found.dtype)
        for given, sign in zip(bounds, (-1, 1), strict=True)
    )
    return new.result("Clip", new.inputs[0], low, high)


def celu(new: Replacement) -> Nodes | None:
    """Celu: ONNX's definition, whose constants of shape [1] would give a scalar a dimension."""
    found = new.type_of(new.inputs[0])
    zero, one = (new.constant(number, found.dtype) for number in (0, 1))
    alpha = new.constant(float(new.attributes.get("alpha", 1.0)), found.dtype)
    below = new.op("Mul", alpha, new.op("Sub", new.op("Exp", new.op("Div", new.inputs[0], alpha)), one))
    return new.result("Add", new.op("Max", new.inputs[0], zero), new.op("Min", below, zero))


def shrink(new: Replacement) -> Nodes | None:
    """Shrink: what is below the one bound, else above the other, else 0.

    TVM rounds the bounds to integers for integers, and tries them in the other order, which matters if
    `lambd` is negative.
    """
    found = new.type_of(new.inputs[0])
    is_float, given = found.dtype.kind == "f", new.attributes
    x = new.inputs[0] if is_float else new.cast(new.inputs[0], TensorProto.FLOAT)
    dtype = found.dtype if is_float else np.dtype(np.float32)
    low, high, bias, zero = (
        new.constant(number, dtype)
        for number in (-given.get("lambd", 0.5), given.get("lambd", 0.5), given.get("bias", 0.0), 0)
    )
    above = new.op("Where", new.op("Greater", x, high), new.op("Sub", x, bias), zero)
    chosen = new.op("Less", x, low), new.op("Add", x, bias), above
    if is_float:
        new.op("Where", *chosen, to=new.outputs[0])
    else:
        new.cast(new.op("Where", *chosen), found.elem_type, to=new.outputs[0])
    return new.nodes


def squeeze(new: Replacement) -> Nodes | None:
    """Squeeze of an empty list of axes: of all axes whose extent is 1, as in ONNX Runtime."""
    axes = new.input(1)
    given = new.graph.constant(axes) if axes else None
    if given is None or given.size:
        return None
    return new.result("Squeeze", new.inputs[0])


def thresholded_relu(new: Replacement) -> Nodes | None:
    """ThresholdedRelu: x or 0. TVM multiplies instead, and 0 times infinity is NaN."""
    found = new.type_of(new.inputs[0])
    bound = new.constant(float(new.attributes.get("alpha", 1.0)), found.dtype)
    beyond = new.op("Greater", new.inputs[0], bound)
    return new.result("Where", beyond, new.inputs[0], new.constant(0, found.dtype))


def sign(new: Replacement) -> Nodes | None:
    """Sign of unsigned integers, for which TVM would need -1: whether they are not zero."""
    found = new.type_of(new.inputs[0])
    if found.dtype.kind != "u":
        return None
    return new.cast_result(new.cast(new.inputs[0], TensorProto.BOOL), found.elem_type)


def equal(new: Replacement) -> Nodes | None:
    """Equal of booleans, which TVM compares as if they were floats: the opposite of Xor."""
    found = new.type_of(new.inputs[0])
    if found.dtype.kind != "b":
        return None
    return new.result("Not", new.op("Xor", *new.inputs))


def is_inf(new: Replacement) -> Nodes | None:
    """IsInf for only one sign: a comparison with that infinity."""
    options = new.attributes
    positive, negative = (bool(options.get(f"detect_{sign}", 1)) for sign in ("positive", "negative"))
    found = new.type_of(new.inputs[0])
    if positive and negative:
        return None
    # With neither sign, a comparison that is never true.
    bound = np.inf if positive else -np.inf if negative else np.nan
    return new.result("Equal", new.inputs[0], new.constant(bound, found.dtype))


def eye_like(new: Replacement) -> Nodes | None:
    """EyeLike: a constant, because it depends only on a shape."""
    found = new.type_of(new.inputs[0])
    shape = new.shape_of(new.inputs[0])
    if len(shape) != 2:
        return None
    options = new.attributes
    dtype = helper.tensor_dtype_to_np_dtype(options.get("dtype", found.elem_type))
    return _constant(new, np.eye(*shape, k=options.get("k", 0), dtype=dtype))


def _constant(new: Replacement, value: np.ndarray) -> Nodes:
    """A Constant, which other rewrites of the same pass see; behind an Identity, they would not."""
    tensor = numpy_helper.from_array(value)
    return [helper.make_node("Constant", [], list(new.outputs), name=new.node.name, value=tensor)]


def optional_has_element(new: Replacement) -> Nodes | None:
    """OptionalHasElement: true for a tensor, false for an absent input or an Optional of nothing."""
    name = new.input(0)
    optional = _optional(new.node, new.graph) if name else None
    if name and optional is None and new.graph.type_of(name) is None:
        return None
    has_element = bool(name if optional is None else input_name(optional, 0))
    return _constant(new, np.array(has_element))


def optional_get_element(new: Replacement) -> Nodes | None:
    """OptionalGetElement of a tensor, or of what Optional made of a value: that value."""
    optional = _optional(new.node, new.graph)
    if optional is None and new.graph.type_of(new.inputs[0]) is None:
        return None
    source = new.inputs[0] if optional is None else optional.input[0]
    return new.result("Identity", source)


def _optional(node: onnx.NodeProto, graph: OnnxGraph) -> onnx.NodeProto | None:
    """The Optional node that made what a node reads; None if there is none."""
    maker = graph.maker_of(node.input[0])
    while maker is not None and maker.op_type == "Identity":
        maker = graph.maker_of(maker.input[0])
    return maker if maker is not None and maker.op_type == "Optional" else None


def swish(new: Replacement) -> Nodes | None:
    """Swish, and SwiGLU of a gate and a value: x sigmoid(alpha x), times the value."""
    found = new.type_of(new.inputs[0])
    alpha = float(new.attributes.get("alpha", 1.0))
    inner = new.inputs[0] if alpha == 1 else new.op("Mul", new.inputs[0], new.constant(alpha, found.dtype))
    gate = new.op("Sigmoid", inner)
    if value := new.input(1):
        new.op("Mul", new.op("Mul", new.inputs[0], gate), value, to=new.outputs[0])
    else:
        new.op("Mul", new.inputs[0], gate, to=new.outputs[0])
    return new.nodes


def sinh(new: Replacement) -> Nodes | None:
    """Sinh: by exponentials where they differ, else by 2 t / (1 - t^2) of t = tanh(x / 2)."""
    found = new.type_of(new.inputs[0])
    x, half, one = new.inputs[0], new.constant(0.5, found.dtype), new.constant(1, found.dtype)
    # Half of the exponent, squared afterwards: exp(x) / 2 overflows later than exp(x).
    grown, fallen = (new.op("Exp", new.op("Mul", each, half)) for each in (x, new.op("Neg", x)))
    squares = [new.op("Mul", new.op("Mul", each, half), each) for each in (grown, fallen)]
    small = new.op("Tanh", new.op("Mul", x, half))
    near = new.op("Div", new.op("Add", small, small), new.op("Sub", one, new.op("Mul", small, small)))
    is_near = new.op("Less", new.op("Abs", x), one)
    return new.result("Where", is_near, near, new.op("Sub", *squares))


def cosh(new: Replacement) -> Nodes | None:
    """Cosh: half the sum of two exponentials."""
    found = new.type_of(new.inputs[0])
    x, half = new.inputs[0], new.constant(0.5, found.dtype)
    grown, fallen = (new.op("Exp", new.op("Mul", each, half)) for each in (x, new.op("Neg", x)))
    return new.result("Add", *(new.op("Mul", new.op("Mul", e, half), e) for e in (grown, fallen)))


def modulo(new: Replacement) -> Nodes | None:
    """Mod of floats with the sign of the divisor: fmod, moved by the divisor where the signs differ."""
    found = new.type_of(new.inputs[0])
    if found.elem_type not in _FLOATS or new.attributes.get("fmod", 0):
        return None
    divisor = new.inputs[1]
    rest = new.op("Mod", new.inputs[0], divisor, fmod=1)
    zero = new.constant(0, found.dtype)
    other = new.op("Xor", *(new.op("Less", each, zero) for each in (rest, divisor)))
    moves = new.op("And", other, new.op("Not", new.op("Equal", rest, zero)))
    return new.result("Where", moves, new.op("Add", rest, divisor), rest)


def bit_shift(new: Replacement) -> Nodes | None:
    """BitShift by an amount that may lie outside of the type's width: only the sign is then left."""
    found = new.type_of(new.inputs[0])
    maker = new.graph.maker_of(new.inputs[1])
    if maker is not None and maker.name.endswith(_SHIFT_MARK):
        return None
    width = found.dtype.itemsize * 8
    amount = new.graph.constant(new.inputs[1])
    if amount is not None and amount.size and amount.min() >= 0 and amount.max() < width:
        return None
    # Compared as INT64: a comparison of bytes has no kernel in ONNX Runtime.
    wide = new.cast(new.inputs[1], TensorProto.INT64)
    fits = new.op("Less", wide, new.constant(width, np.int64))
    if found.dtype.kind == "i":
        fits = new.op("And", fits, new.op("Not", new.op("Less", wide, new.constant(0, np.int64))))
    zero = new.constant(0, found.dtype)
    shift = new.op("Where", fits, new.inputs[1], zero)
    new.nodes[-1].name += _SHIFT_MARK
    direction = str(new.attributes["direction"])
    shifted = new.op("BitShift", new.inputs[0], shift, direction=direction)
    rest = zero
    if found.dtype.kind == "i" and direction == "RIGHT":
        negative = new.op("Less", new.inputs[0], zero)
        rest = new.op("Where", negative, new.constant(-1, found.dtype), zero)
    return new.result("Where", fits, shifted, rest)


_SHIFT_MARK: Final = "/in_width"


def reduce_bool(new: Replacement) -> Nodes | None:
    """ReduceMax and ReduceMin of booleans: as bytes."""
    found = new.type_of(new.inputs[0])
    if found.elem_type != TensorProto.BOOL:
        return None
    options = new.attributes
    wide = new.cast(new.inputs[0], TensorProto.INT32)
    result = new.op(new.node.op_type, wide, *new.inputs[1:], **options)
    # Of no elements, the largest and the smallest are the limits of the type.
    return new.result("Greater", result, new.constant(0, np.int32))


def reduce_nothing(new: Replacement) -> Nodes | None:
    """A reduction of no axes (`noop_with_empty_axes`): only what is done to each number."""
    name, given = new.input(1), new.attributes
    if given.get("axes") == []:  # of `amax` without axes: all of them, but TVM cannot read it
        without = copy_node(new.node)
        set_attributes(without, ["axes"], {})
        return [without]
    axes = new.graph.constant(name) if name else None
    if not given.get("noop_with_empty_axes", 0) or (name and (axes is None or axes.size)):
        return reduce_bool(new) if new.node.op_type in ("ReduceMax", "ReduceMin") else None
    x = new.inputs[0]
    match new.node.op_type:
        case "ReduceL1" | "ReduceL2":
            return new.result("Abs", x)
        case "ReduceLogSum":
            return new.result("Log", x)
        case "ReduceSumSquare":
            return new.result("Mul", x, x)
    return new.result("Identity", x)


def _reduced(new: Replacement, kinds: str) -> tuple[np.dtype[Any], tuple[int, ...], list[int]] | None:
    """Type, shape and reduced axes of numbers of these kinds; None if unknown, or if nothing is reduced."""
    found, shape = new.graph.type_of(new.inputs[0]), new.graph.shape_of(new.inputs[0])
    name = new.input(1)
    axes = new.graph.constant(name) if name else np.array(new.attributes.get("axes", []))
    if found is None or shape is None or found.dtype.kind not in kinds or axes is None:
        return None
    if not axes.size and new.attributes.get("noop_with_empty_axes", 0):
        return None
    return found.dtype, shape, sorted({int(axis) % len(shape) for axis in axes}) or list(range(len(shape)))


def reduce_log_sum_exp(new: Replacement) -> Nodes | None:
    """ReduceLogSumExp: the largest number is subtracted, unless it is infinite, as where all are masked."""
    reduced = _reduced(new, "f")
    if reduced is None or not reduced[1] or 0 in reduced[1]:
        return reduce_nothing(new)
    dtype, _, axes = reduced
    keep, x = bool(new.attributes.get("keepdims", 1)), new.inputs[0]
    top = new.reduce("ReduceMax", x, axes, keep=True)
    top = new.op("Where", new.op("IsInf", top), new.constant(0, dtype), top)
    total = new.reduce("ReduceSum", new.op("Exp", new.op("Sub", x, top)), axes, keep=keep)
    if not keep:
        top = new.op("Squeeze", top, new.ints(*axes))
    return new.result("Add", new.op("Log", total), top)


def reduce_mean(new: Replacement) -> Nodes | None:
    """ReduceMean of integers: their sum, divided as integers are."""
    reduced = _reduced(new, "iu")
    if reduced is None:
        return reduce_nothing(new)
    dtype, shape, axes = reduced
    count = math.prod(shape[axis] for axis in axes)
    if count < 1:
        return None
    total = new.reduce("ReduceSum", new.inputs[0], axes, keep=bool(new.attributes.get("keepdims", 1)))
    return new.result("Div", total, new.constant(count, dtype))
