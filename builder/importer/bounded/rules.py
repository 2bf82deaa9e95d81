"""What each operator does with inputs whose lengths are only known at run time.

`RULES` is the table. Operators that are not in it are refused with such inputs: nothing passes by default,
because a result that contains padding would be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import onnx

from builder.importer.bounded import moves, reshaping, sources
from builder.importer.bounded.length import Entry, Length
from builder.importer.bounded.padded_graph import PaddedGraph
from builder.importer.onnx_graph import attributes, copy_node
from builder.importer.rewrites.replacement import input_name

Rule: TypeAlias = Callable[[onnx.NodeProto, PaddedGraph], None]


def elementwise(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Operators on elements, with NumPy's broadcasting."""
    g.copy(node)
    to = node.output[0]
    rank = len(g.shape(to))
    result: dict[int, Length] = {}
    for name in node.input:
        for axis, length in g.lengths.get(name, {}).items() if name else ():
            place = axis + rank - len(g.shape(name))
            if result.setdefault(place, length) != length:
                g.refuse("its inputs have lengths that are computed differently")
    for name in node.input:
        if not name:
            continue
        dims = g.dims(name)
        for axis, length in result.items():
            place = axis - rank + len(dims)
            if place >= 0 and dims[place] not in (1, length):
                g.refuse("its inputs have lengths that are computed differently")
    g.bound(to, result)
    if node.op_type in _KEEP_SIGN and node.input[0] in g.natural:
        g.natural.add(to)
    _track(node, g)


_KEEP_SIGN: Final = frozenset({"Cast", "Identity", "Abs"})
_ARITHMETIC: Final = frozenset({"Add", "Sub", "Mul", "Min", "Max", "Div", "Equal", "Where"})


def _track(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Follow lengths through arithmetic on shapes."""
    to = node.output[0]
    if g.dtype(to).kind not in "iub" or len(g.shape(to)) > 1:
        return
    if node.op_type in ("Identity", "Cast") and (known := g.entries(node.input[0])) is not None:
        g.contents[to] = known
        return
    arity = 3 if node.op_type == "Where" else 2
    if node.op_type not in _ARITHMETIC or len(node.input) != arity:
        return
    found = [entries for name in node.input if (entries := g.entries(name)) is not None]
    if len(found) != arity:
        return
    count = max(map(len, found))
    made: list[Entry] = []
    for operands in zip(*(e * count if len(e) == 1 else e for e in found), strict=True):
        one = _computed(g, node.op_type, *operands)
        if one is None:
            return
        made.append(one)
    g.contents[to] = tuple(made)


def _computed(g: PaddedGraph, op_type: str, a: Entry, b: Entry, c: Entry = 0) -> Entry | None:
    """An element of a shape, or of a comparison of shapes (1 for true); None if it is not known."""
    if op_type == "Where":
        return (b if a else c) if isinstance(a, int) else None
    if op_type == "Equal":
        if (isinstance(a, int) and isinstance(b, int)) or a == b:
            return int(a == b)
        least = (
            min(e for e in (a, b) if isinstance(e, int)) if isinstance(a, int) or isinstance(b, int) else 0
        )
        return 0 if least < 0 else None
    most_a, most_b = (e if isinstance(e, int) else e.capacity for e in (a, b))
    if op_type == "Div":
        if not isinstance(b, int) or b < 1 or (isinstance(a, int) and a < 0):
            return None
        return a // b if isinstance(a, int) else g.quotient(a, b)
    capacity = {
        "Add": most_a + most_b,
        "Sub": most_a if isinstance(b, Length) else most_a - most_b,
        "Mul": most_a * most_b,
        "Min": min(most_a, most_b),
        "Max": max(most_a, most_b),
    }[op_type]
    if capacity < 0 or (isinstance(a, int) and a < 0 and isinstance(b, Length)):
        return None
    return g.arithmetic(op_type, a, b, capacity)


# The neutral element that each reduction needs in the padding.
_NEUTRAL: Final[Mapping[str, float]] = {
    "ReduceL1": 0,
    "ReduceL2": 0,
    "ReduceLogSum": 0,
    "ReduceLogSumExp": -math.inf,
    "ReduceMean": 0,
    "ReduceProd": 1,
    "ReduceSum": 0,
    "ReduceSumSquare": 0,
}


def reduce(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Reductions: over a padded axis, of what is real."""
    options = attributes(node)
    x, to = node.input[0], node.output[0]
    rank = len(g.shape(x))
    name = input_name(node, 1)
    axes = g.entries(name) if name else tuple(options.get("axes", ()))
    if axes is None or any(isinstance(axis, Length) for axis in axes):
        g.refuse("its axes depend on values that are only known at run time")
    places = sorted({int(axis) % rank for axis in axes if isinstance(axis, int)})
    if not places and options.get("noop_with_empty_axes", 0):
        g.op("Identity", x, to=to)
        g.bound(to, g.lengths.get(x, {}))
        return
    places = places or list(range(rank))
    lengths = g.lengths.get(x, {})
    keep = bool(options.get("keepdims", 1))
    dtype = g.dtype(x)
    if node.op_type == "ReduceMax":
        neutral = sources.lowest(dtype)
    elif node.op_type == "ReduceMin":
        neutral = sources.highest(dtype)
    else:
        neutral = _NEUTRAL[node.op_type]
    value = g.filled(x, neutral, places)
    cut = [axis for axis in places if axis in lengths]
    if node.op_type == "ReduceMean" and cut:
        number: Entry = 1
        for axis in places:
            dim = lengths.get(axis, g.shape(x)[axis])
            most = (number if isinstance(number, int) else number.capacity) * g.shape(x)[axis]
            number = g.arithmetic("Mul", number, dim, most)
        made = g.op("ReduceSum", value, g.ints(*places), keepdims=int(keep))
        # Of nothing, it is 0, as in ONNX Runtime.
        divisor = g.cast(g.op("Max", g.scalar(number), g.ints(1)), g.elem_type(x))
        if not g.shape(made):
            divisor = g.op("Reshape", divisor, g.ints())
        g.op("Div", made, divisor, to=to)
    elif cut and node.op_type in ("ReduceMax", "ReduceMin") and dtype.kind == "f":
        # TVM's largest and smallest of nothing are finite numbers.
        made = g.graph.fresh(f"{to}/of_some")
        copy = copy_node(node)
        copy.input[0], copy.output[0] = value, made
        g.add(copy)
        some = g.op("Greater", lengths[cut[0]].name, g.ints(0))
        for axis in cut[1:]:
            some = g.op("And", some, g.op("Greater", lengths[axis].name, g.ints(0)))
        if not g.shape(made):
            some = g.op("Reshape", some, g.ints())
        g.op("Where", some, made, g.constant(neutral, dtype), to=to)
    else:
        g.copy(node, [value, *node.input[1:]])
    g.bound(to, moves.moved(lengths, places, keep=keep))


def arg_reduce(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """ArgMax and ArgMin."""
    options = attributes(node)
    x = node.input[0]
    axis = int(options.get("axis", 0)) % len(g.shape(x))
    lengths = g.lengths.get(x, {})
    if axis in lengths and options.get("select_last_index", 0):
        g.refuse("expected the first index of equal elements")
    worst = sources.lowest(g.dtype(x)) if node.op_type == "ArgMax" else sources.highest(g.dtype(x))
    g.copy(node, [g.filled(x, worst, [axis])])
    g.bound(node.output[0], moves.moved(lengths, [axis], keep=bool(options.get("keepdims", 1))))
    g.natural.add(node.output[0])


def along_axis(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Softmax and others along one axis."""
    x = node.input[0]
    axis = int(attributes(node).get("axis", -1)) % len(g.shape(x))
    value = x
    if axis in g.lengths.get(x, {}):
        if node.op_type not in ("Softmax", "LogSoftmax", "Hardmax"):
            g.refuse("it works along an axis whose length is only known at run time")
        value = g.filled(x, -math.inf, [axis])
    g.copy(node, [value, *node.input[1:]])
    for name in node.output:
        if name:
            g.bound(name, g.lengths.get(x, {}))


def layer_norm(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """LayerNormalization over the last axes."""
    x = node.input[0]
    axis = int(attributes(node).get("axis", -1)) % len(g.shape(x))
    lengths = g.lengths.get(x, {})
    if any(place >= axis for place in lengths):
        g.refuse("it works along an axis whose length is only known at run time")
    g.copy(node)
    for name in node.output:
        if name:
            g.bound(name, lengths)


def cumulative_sum(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """CumSum."""
    x = node.input[0]
    axes = g.entries(node.input[1])
    if axes is None or isinstance(axes[0], Length):
        g.refuse("its axis depends on values that are only known at run time")
    axis = axes[0] % len(g.shape(x))
    g.copy(node, [g.filled(x, 0, [axis]), node.input[1]])
    g.bound(node.output[0], g.lengths.get(x, {}))


def matmul(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """MatMul: what is not real adds nothing to a sum."""
    values = []
    ranks = [len(g.shape(name)) for name in node.input]
    result: dict[int, Length] = {}
    rank = max(ranks)
    for index, name in enumerate(node.input):
        summed = ranks[index] - 1 if index == 0 or ranks[index] == 1 else ranks[index] - 2
        values.append(g.filled(name, 0, [summed]))
        for axis, length in g.lengths.get(name, {}).items():
            if axis == summed:
                continue
            place = axis + rank - ranks[index]
            if result.setdefault(place, length) != length:
                g.refuse("its inputs have lengths that are computed differently")
    if min(ranks) < 2 and result:
        g.refuse("expected matrices")
    both = [g.lengths.get(name, {}).get(ranks[i] - 1 - i) for i, name in enumerate(node.input)]
    if any(both) and both[0] != both[1]:
        g.refuse("its inputs have lengths that are computed differently")
    g.copy(node, values)
    g.bound(node.output[0], result)


def gemm(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Gemm of rows whose number is only known at run time."""
    row = int(bool(attributes(node).get("transA", 0)))
    lengths = g.lengths.get(node.input[0], {})
    if set(lengths) - {row} or any(g.lengths.get(name) for name in node.input[1:] if name):
        g.refuse("expected a known number of columns and a known weight")
    g.copy(node)
    g.bound(node.output[0], {0: lengths[row]} if row in lengths else {})


def batched(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """Operators that treat the elements of a batch one by one."""
    lengths = g.lengths.get(node.input[0], {})
    if set(lengths) - {0} or any(g.lengths.get(name) for name in node.input[1:] if name):
        g.refuse("only the batch may have a length that is only known at run time")
    g.copy(node)
    for name in node.output:
        if name:
            g.bound(name, lengths)


def roi_align(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """RoiAlign of regions whose number is only known at run time."""
    x, regions, batches = node.input
    if g.lengths.get(x) or set(g.lengths.get(regions, {})) - {0}:
        g.refuse("expected pictures of known size")
    lengths = g.lengths.get(regions, {})
    if g.lengths.get(batches, {}) != lengths:
        g.refuse("its inputs have lengths that are computed differently")
    g.copy(node)
    g.bound(node.output[0], lengths)


def one_hot(node: onnx.NodeProto, g: PaddedGraph) -> None:
    """OneHot of indices whose number is only known at run time."""
    rank = len(g.shape(node.input[0])) + 1
    axis = int(attributes(node).get("axis", -1)) % rank
    g.copy(node)
    lengths = g.lengths.get(node.input[0], {})
    g.bound(node.output[0], {place + (place >= axis): length for place, length in lengths.items()})


_ELEMENTWISE: Final = (
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd"),
    *("BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast", "Ceil", "Celu", "Clip", "Cos", "Cosh", "Div"),
    *("Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid"),
    *("HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean"),
    *("Min", "Mish", "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu"),
    *("Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Tan"),
    *("Tanh", "ThresholdedRelu", "Where", "Xor"),
)
_REDUCE: Final = (*_NEUTRAL, "ReduceMax", "ReduceMin")
_BATCHED: Final = (
    *("AveragePool", "BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool"),
    *("GlobalMaxPool", "InstanceNormalization", "LRN", "MaxPool", "SpaceToDepth"),
)

# Operators whose outputs may have such a length although no input has.
SOURCES: Final[Mapping[str, Rule]] = {
    "Compress": sources.compress,
    "ConstantOfShape": sources.constant_of_shape,
    "Expand": moves.expand,
    "NonMaxSuppression": sources.non_max_suppression,
    "NonZero": sources.non_zero,
    "Range": sources.make_range,
    "Reshape": reshaping.reshape,
    "Slice": moves.cut,
    "Tile": moves.tile,
    "TopK": sources.top_k,
    "Unique": sources.unique,
}

RULES: Final[Mapping[str, Rule]] = {
    **SOURCES,
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    **dict.fromkeys(_REDUCE, reduce),
    **dict.fromkeys(_BATCHED, batched),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax", "LpNormalization"), along_axis),
    "ArgMax": arg_reduce,
    "ArgMin": arg_reduce,
    "Concat": moves.concat,
    "CumSum": cumulative_sum,
    "Flatten": reshaping.flatten,
    "Gather": moves.gather,
    "GatherElements": moves.gather_elements,
    "GatherND": moves.gather_nd,
    "Gemm": gemm,
    "LayerNormalization": layer_norm,
    "MatMul": matmul,
    "OneHot": one_hot,
    "Pad": moves.pad,
    "RoiAlign": roi_align,
    "ScatterElements": moves.scatter,
    "ScatterND": moves.scatter,
    "Shape": moves.shape,
    "Size": moves.size,
    "Split": moves.split,
    "Squeeze": moves.squeeze,
    "Transpose": moves.transpose,
    "Unsqueeze": moves.unsqueeze,
}
