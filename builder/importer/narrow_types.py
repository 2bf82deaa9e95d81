"""Numbers of 8 bits and fewer that no kernel takes, as bytes: float8, float4, and integers of 4 and 2 bits.

Promises the values of ONNX's Cast, CastLike, QuantizeLinear and DequantizeLinear. A float is the byte that
holds its bits, one number a byte, and NaN at an output is always the same byte; an integer is that integer.
All other operators may only move such numbers. Leaves to others: Casts to and from texts, and subgraphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from builder.errors import VALUE_HINT, ModelError, Obstacle, UnsupportedOperatorError
from builder.importer.control_flow import rename
from builder.importer.onnx_graph import (
    OnnxGraph,
    attributes,
    copy_node,
    reads,
    remove_dead_nodes,
    set_attributes,
    subgraphs,
    walk_nodes,
)
from builder.importer.rewrites.replacement import Replacement, input_name
from builder.importer.shapes import infer_shapes

FLOATS: Final = frozenset(
    getattr(TensorProto, name)
    for name in ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "FLOAT4E2M1")
    if hasattr(TensorProto, name)
)
# Integers -> how many bits they have.
INTEGERS: Final[Mapping[int, int]] = {
    getattr(TensorProto, name): int(name[-1])
    for name in ("INT4", "UINT4", "INT2", "UINT2")
    if hasattr(TensorProto, name)
}
NARROW: Final = FLOATS.union(INTEGERS)
# These have one NaN, in the place of -0.
_WITHOUT_SIGNED_ZERO: Final = frozenset({TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2FNUZ})
_EXPONENTS: Final = getattr(TensorProto, "FLOAT8E8M0", None)
# ONNX Runtime lacks Casts of these, in some opsets or all. To other narrow integers, it rounds what it casts.
_LACKING: Final = frozenset(
    {_EXPONENTS, TensorProto.FLOAT4E2M1, *(k for k, bits in INTEGERS.items() if bits < 4)}
)
_CASTS: Final = frozenset({"Cast", "CastLike"})
_MOVING: Final = frozenset(
    {
        "Compress", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "Flatten", "Gather",
        "GatherElements", "GatherND", "Identity", "Reshape", "ReverseSequence", "ScatterElements",
        "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose",
        "Unsqueeze", "Where",
    }
)  # fmt: skip
_HINT: Final = "put a Cast or a DequantizeLinear before them, so that they compute with floats"
_BYTE: Final = np.arange(256, dtype=np.uint8)


def carrier(kind: int) -> int:
    """Return the type of the bytes that stand for a narrow type."""
    signed = kind in INTEGERS and not TensorProto.DataType.Name(kind).startswith("U")
    return int(TensorProto.INT8 if signed else TensorProto.UINT8)


def decoded(codes: NDArray[Any], kind: int) -> NDArray[Any]:
    """Return the numbers that bytes stand for: floats as float32, integers as they are."""
    if kind in INTEGERS:
        return codes
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    few = codes & (15 if kind == TensorProto.FLOAT4E2M1 else 255)
    return np.asarray(few.astype(np.uint8).view(dtype).astype(np.float32))


def encoded(numbers: NDArray[Any], kind: int) -> NDArray[Any]:
    """Return the bytes that stand for numbers of a narrow type."""
    if kind in INTEGERS:
        return numbers.astype(helper.tensor_dtype_to_np_dtype(carrier(kind)))
    with np.errstate(invalid="ignore", over="ignore"):
        codes = numbers.astype(helper.tensor_dtype_to_np_dtype(kind)).view(np.uint8)
    return _with_one_nan(kind)[codes]


def narrow_edges(model: onnx.ModelProto) -> dict[str, int]:
    """Return the inputs and outputs of narrow types, and their types."""
    return {
        value.name: value.type.tensor_type.elem_type
        for value in (*model.graph.input, *model.graph.output)
        if value.type.tensor_type.elem_type in NARROW
    }


def disagreement(model: onnx.ModelProto) -> str:
    """Say why ONNX Runtime's answers to a model are not ONNX's; empty if nothing is known."""
    edges = set(narrow_edges(model).values())
    kinds = edges & _LACKING
    for node in walk_nodes(model.graph):
        if node.op_type == "Cast":
            to = attributes(node).get("to")  # before opset 6, the name of a type
            kinds |= {kind for kind in (*_LACKING, *INTEGERS) if kind == to}
        elif node.op_type == "CastLike":
            kinds |= edges & set(INTEGERS)
    found = sorted(TensorProto.DataType.Name(kind) for kind in kinds)
    return f"because ONNX Runtime casts to {found[0]} in another way than ONNX" if found else ""


def widen_edges(model: onnx.ModelProto) -> None:
    """Give inputs and outputs of narrow types wider ones, in place: NumPy lacks them."""
    graph = OnnxGraph(model)
    edges = narrow_edges(model)
    names = {name: graph.fresh(name) for name in edges}
    for node in walk_nodes(model.graph):
        rename(node, names)
    before = []
    for value in (*model.graph.input, *model.graph.output):
        kind = edges.get(value.name)
        if kind is None:
            continue
        wide = carrier(kind) if kind in INTEGERS else TensorProto.FLOAT
        value.type.tensor_type.elem_type = wide
        if value.name in {each.name for each in model.graph.input}:
            before.append(helper.make_node("Cast", [value.name], [names[value.name]], to=kind))
        else:
            model.graph.node.append(helper.make_node("Cast", [names[value.name]], [value.name], to=wide))
    nodes = [*before, *map(copy_node, model.graph.node)]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def use_bytes(model: onnx.ModelProto, progress: Callable[[str], None]) -> None:
    """Replace narrow types by bytes, in place.

    `model`: the model, with static inputs. The types of values inside it are forgotten.
    Raises `UnsupportedOperatorError` if an operator computes with such numbers.
    """
    if not _has_narrow(model):
        return
    infer_shapes(model, strict=False)
    graph = OnnxGraph(model)
    pass_ = _Bytes(graph)
    pass_.check()
    graph.rewrite(pass_.replace)
    for tensor in model.graph.initializer:
        if tensor.data_type in NARROW:
            tensor.CopyFrom(numpy_helper.from_array(_bytes_of(tensor), tensor.name))
    pass_.finish_outputs()
    for value, role in (
        *((v, "input") for v in model.graph.input),
        *((v, "output") for v in model.graph.output),
    ):
        kind = value.type.tensor_type.elem_type
        if kind in NARROW:
            value.type.tensor_type.elem_type = carrier(kind)
            progress(f"{role} '{value.name}': {_meaning(kind)}")
    del model.graph.value_info[:]
    remove_dead_nodes(model.graph)


def _meaning(kind: int) -> str:
    name = TensorProto.DataType.Name(kind)
    served = TensorProto.DataType.Name(carrier(kind))
    if kind in INTEGERS:
        low, high = limits(kind)
        return f"{name} becomes {served} from {low} to {high}, one number a byte"
    return f"{name} becomes {served}, one number a byte: the byte holds the number's bits"


def _has_narrow(model: onnx.ModelProto) -> bool:
    graph = model.graph
    if any(tensor.data_type in NARROW for tensor in graph.initializer) or narrow_edges(model):
        return True
    return any(
        (attribute.i in NARROW and attribute.name in ("to", "output_dtype"))
        or (attribute.HasField("t") and attribute.t.data_type in NARROW)
        for node in graph.node
        for attribute in node.attribute
    )


def limits(kind: int) -> tuple[int, int]:
    """Return the smallest and the largest number of an integer type of few bits."""
    bits = INTEGERS[kind]
    return (
        (0, 2**bits - 1) if carrier(kind) == TensorProto.UINT8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    )


def _bytes_of(tensor: TensorProto) -> NDArray[Any]:
    values = np.asarray(numpy_helper.to_array(tensor))
    if tensor.data_type in INTEGERS:
        return values.astype(helper.tensor_dtype_to_np_dtype(carrier(tensor.data_type)))
    return values.view(np.uint8)


def _with_one_nan(kind: int) -> NDArray[np.uint8]:
    """Return each byte, and for all that are NaN the same one."""
    nan = np.isnan(decoded(_BYTE, kind))
    return np.where(nan, _BYTE[nan][:1].sum(dtype=np.uint8), _BYTE).astype(np.uint8)


class _Bytes:
    """One pass over a graph."""

    def __init__(self, graph: OnnxGraph) -> None:
        self._graph = graph
        self._encoded: set[str] = set()

    def _kind(self, name: str) -> int:
        """The narrow type of a value; 0 if it is of another type."""
        found = self._graph.type_of(name) if name else None
        return found.elem_type if found is not None and found.elem_type in NARROW else 0

    def check(self) -> None:
        """Refuse operators that compute with narrow numbers."""
        obstacles = []
        for node in self._graph.proto.node:
            kind = next(filter(None, map(self._kind, (*reads(node), *node.output))), 0)
            known = node.op_type in _MOVING | _CASTS | {"QuantizeLinear", "DequantizeLinear"}
            known &= not node.domain or node.op_type == "DequantizeLinear"
            if kind and (not known or any(subgraphs(node))):
                reason = f"it cannot take or make numbers of {TensorProto.DataType.Name(kind)}"
                obstacles.append(Obstacle(node.op_type, (node.name,), reason))
        if obstacles:
            raise UnsupportedOperatorError.listing(obstacles, hint=_HINT)

    def replace(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """Replace a node that makes narrow numbers of others, or others of narrow ones."""
        before, after = self._kind(input_name(node, 0)), self._kind(node.output[0])
        new = Replacement(node, self._graph)
        if node.op_type in _CASTS and (before or after):
            self._cast(new, node, before, after)
        elif node.op_type == "DequantizeLinear" and (before in FLOATS or self._kind(node.input[1])):
            self._dequantise(new, node, before)
        elif node.op_type == "QuantizeLinear" and after:
            self._quantise(new, node, after)
        elif node.op_type in ("Constant", "ConstantOfShape") and after:
            tensor = next((a.t for a in node.attribute if a.name == "value"), None)
            if tensor is None:
                return None
            changed = copy_node(node)
            set_attributes(changed, (), {"value": numpy_helper.from_array(_bytes_of(tensor))})
            return [changed]
        else:
            return None
        return new.nodes

    def finish_outputs(self) -> None:
        """Give each NaN at an output the same byte."""
        for output in self._graph.proto.output:
            kind = output.type.tensor_type.elem_type
            if kind not in FLOATS or output.name in self._encoded:
                continue
            if (table := _with_one_nan(kind)).tolist() == _BYTE.tolist():
                continue
            node = self._graph.maker_of(output.name)
            if node is None:
                continue
            name = self._graph.fresh(output.name)
            for each in self._graph.proto.node:
                rename(each, {output.name: name})
            new = Replacement(node, self._graph)
            places = new.cast(name, TensorProto.INT32)
            new.op("Gather", new.constant(table, np.uint8), places, to=output.name)
            self._graph.proto.node.extend(new.nodes)

    def _cast(self, new: Replacement, node: onnx.NodeProto, before: int, after: int) -> None:
        found = self._graph.type_of(node.output[0])
        if found is None:
            raise ModelError(f"expected a known type of '{node.output[0]}'", hint="export the model again")
        source = self._decode(new, node.input[0], before)
        if after:
            self._encode(new, source, after, node)
        else:
            new.cast(source, found.elem_type, to=node.output[0])

    def _decode(self, new: Replacement, name: str, kind: int) -> str:
        """Return float32 for floats; integers, and what is not narrow, as they are."""
        if kind not in FLOATS:
            return name
        known = self._graph.constant(name)
        if known is not None:
            # Here, because folding makes no constants that are so much larger than what they are made of.
            return new.constant(decoded(known.view(np.uint8), kind), np.float32)
        table = new.constant(decoded(_BYTE, kind), np.float32)
        return new.op("Gather", table, new.cast(name, TensorProto.INT32))

    def _encode(self, new: Replacement, x: str, kind: int, node: onnx.NodeProto) -> None:
        options, to = attributes(node), node.output[0]
        if kind in INTEGERS:
            self._wrap(new, x, kind, to)
            return
        saturates = bool(options.get("saturate", 1))
        self._encoded.add(to)
        # float64 is rounded to float32 first, as ONNX Runtime and ml_dtypes round it.
        x = new.cast(x, TensorProto.FLOAT)
        if kind == _EXPONENTS:
            code = _exponents(new, x, saturates=saturates, rounding=str(options.get("round_mode", "up")))
        else:
            code = _signed(new, x, kind, saturates=saturates)
        new.cast(code, TensorProto.UINT8, to=to)

    def _wrap(self, new: Replacement, x: str, kind: int, to: str) -> None:
        """Keep the lowest bits of an integer, or of a float without its fraction."""
        size, low = 2 ** INTEGERS[kind], limits(kind)[0]
        whole = new.cast(x, TensorProto.INT32)
        # Powers of two: an integer's own wrap-around changes nothing.
        moved = new.op("Sub", whole, new.constant(low, np.int32))
        rest = new.op("Mod", moved, new.constant(size, np.int32))
        new.cast(new.op("Add", rest, new.constant(low, np.int32)), carrier(kind), to=to)

    def _dequantise(self, new: Replacement, node: onnx.NodeProto, kind: int) -> None:
        found = self._graph.type_of(node.output[0])
        scale = self._decode(new, node.input[1], self._kind(node.input[1]))
        if kind in FLOATS:
            factor = new.cast(self._spread(new, node, scale), TensorProto.FLOAT)
            real = new.op("Mul", self._decode(new, node.input[0], kind), factor)
        else:
            kept = {name: value for name, value in attributes(node).items() if name != "output_dtype"}
            real = new.op("DequantizeLinear", node.input[0], scale, *node.input[2:], **kept)
        new.cast(real, found.elem_type if found else TensorProto.FLOAT, to=node.output[0])

    def _quantise(self, new: Replacement, node: onnx.NodeProto, kind: int) -> None:
        scale = self._decode(new, node.input[1], self._kind(node.input[1]))
        if kind in FLOATS:
            ratio = new.op("Div", node.input[0], self._spread(new, node, scale))
            self._encode(new, ratio, kind, node)
            return
        low, high = limits(kind)
        dtype = helper.tensor_dtype_to_np_dtype(carrier(kind))
        zero = input_name(node, 2)
        if not zero:
            zero = new.constant(np.zeros(self._graph.shape_of(node.input[1]) or ()), dtype)
        kept = {
            name: value
            for name, value in attributes(node).items()
            if name not in ("output_dtype", "saturate")
        }
        wide = new.op("QuantizeLinear", node.input[0], scale, zero, **kept)
        new.op("Clip", wide, new.constant(low, dtype), new.constant(high, dtype), to=node.output[0])

    def _spread(self, new: Replacement, node: onnx.NodeProto, name: str) -> str:
        """Return the node's scales, which have this name, in a shape that broadcasts to its first input."""
        shape, scales = self._graph.shape_of(node.input[0]), self._graph.shape_of(node.input[1])
        if shape is None or scales is None:
            raise ModelError(f"expected known shapes for {node.op_type} '{node.name}'", hint=VALUE_HINT)
        if int(np.prod(scales)) == 1:
            return new.op("Reshape", name, new.ints())
        options = attributes(node)
        axis = int(options.get("axis", 1)) % len(shape)
        if block := int(options.get("block_size", 0)):
            places = np.arange(shape[axis]) // block
            return new.op("Gather", name, new.constant(places, np.int64), axis=axis)
        return new.op("Reshape", name, new.ints(*(-1 if each == axis else 1 for each in range(len(shape)))))


def _count(new: Replacement, x: str, bounds: NDArray[Any]) -> str:
    """Return how many of the bounds each number reaches, as INT32."""
    column = new.op("Unsqueeze", x, new.ints(-1))
    reached = new.op("GreaterOrEqual", column, new.constant(bounds, bounds.dtype))
    return new.reduce("ReduceSum", new.cast(reached, TensorProto.INT32), [-1], keep=False)


def _signed(new: Replacement, x: str, kind: int, *, saturates: bool) -> str:
    """Return the bytes of numbers that are rounded to the nearest, ties to even."""
    sign = 8 if kind == TensorProto.FLOAT4E2M1 else 128
    values = decoded(_BYTE[:sign], kind)
    finite = values[np.isfinite(values)]
    # The first numbers are multiples of the smallest. Then the step doubles, always after as many numbers.
    period = int(np.argmax(np.diff(finite) > finite[1])) // 2
    doublings = finite[2 * period :: period]
    steps = finite[1] * 2.0 ** np.arange(len(doublings) + 1)
    most = len(finite) - 1

    def number(value: float) -> str:
        return new.constant(value, np.float32)

    size, zero = new.op("Abs", x), number(0)
    doubled = _count(new, size, doublings)
    whole = new.op(
        "Round", new.op("Mul", size, new.op("Gather", new.constant(1 / steps, np.float32), doubled))
    )
    before = new.op("Gather", new.constant(period * np.arange(len(steps)), np.float32), doubled)
    # What is behind the largest number is infinity or NaN, if the format has one.
    limit = most if saturates or most + 1 == sign == 8 else most + 1
    code = new.op("Min", new.op("Add", whole, before), number(limit))
    negative = new.op("Less", x, zero)
    if kind in _WITHOUT_SIGNED_ZERO:
        signed = new.op("And", new.op("Greater", code, zero), new.op("Less", code, number(most + 1)))
        negative = new.op("And", negative, signed)
    else:
        below = new.op("Less", new.op("Div", number(1), x), zero)
        negative = new.op("Or", negative, new.op("And", new.op("Equal", x, zero), below))
    code = new.op("Where", negative, new.op("Add", code, number(sign)), code)
    nan = encoded(np.array(np.nan, np.float32), kind)
    return new.op("Where", new.op("IsNaN", x), number(float(nan)), code)


def _exponents(new: Replacement, x: str, *, saturates: bool, rounding: str) -> str:
    """Return the bytes of float8e8m0, which has powers of two and no signs."""
    powers = np.ldexp(1.0, np.arange(-127, 128))
    if rounding == "down":
        bounds = np.append(powers[1:], np.inf)
    else:
        bounds = (
            1.5 * powers
            if rounding == "nearest"
            else np.nextafter(powers.astype(np.float32), np.float32(np.inf))
        )
    if saturates:
        bounds[-1] = np.inf
    # A bound that is denormal might be taken for zero.
    limits = np.maximum(bounds, np.finfo(np.float32).tiny).astype(np.float32)
    code = _count(new, new.op("Abs", x), limits)
    return new.op("Where", new.op("IsNaN", x), new.constant(255, np.int32), code)
