"""Operators of StableHLO that converters leave in a file, and REDUCE_WINDOW. Nothing is broadcast.

Source: StableHLO specification (openxla.org/stablehlo/spec).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import SMALL, Operation
from builder.importer.tflite.operators.elementwise import comparison
from builder.importer.tflite.operators.shaping import dilated, pad_with
from builder.importer.tflite.operators.slicing import update_slice

Converter = Callable[[Operation], None]

_DIRECTION: Final = tflite.StablehloComparisonDirection
_COMPARISONS: Final = MappingProxyType(
    {
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_EQ: comparison("Equal"),
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_NE: comparison("Equal", negated=True),
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_GE: comparison("GreaterOrEqual"),
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_GT: comparison("Greater"),
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_LE: comparison("LessOrEqual"),
        _DIRECTION.STABLEHLO_COMPARISON_DIRECTION_LT: comparison("Less"),
    }
)
_TOTAL_ORDER: Final = tflite.StablehloComparisonType.STABLEHLO_COMPARISON_TYPE_FLOAT_TOTAL_ORDER
_FUNCTION: Final = tflite.ReduceWindowFunction
# How two numbers are reduced to one.
REDUCERS: Final = MappingProxyType(
    {"ADD": "Add", "MUL": "Mul", "MAXIMUM": "Max", "MINIMUM": "Min"}
    | {"STABLEHLO_ADD": "Add", "STABLEHLO_MULTIPLY": "Mul"}
    | {"STABLEHLO_MAXIMUM": "Max", "STABLEHLO_MINIMUM": "Min"}
    | {"LOGICAL_AND": "And", "LOGICAL_OR": "Or", "STABLEHLO_AND": "And", "STABLEHLO_OR": "Or"}
)
_WINDOW_REDUCERS: Final = MappingProxyType(
    {
        _FUNCTION.ADD: "Add",
        _FUNCTION.MUL: "Mul",
        _FUNCTION.MINIMUM: "Min",
        _FUNCTION.MAXIMUM: "Max",
        _FUNCTION.ALL: "And",
        _FUNCTION.ANY: "Or",
    }
)
_REDUCTIONS: Final = MappingProxyType(
    {"Add": "ReduceSum", "Mul": "ReduceProd", "Max": "ReduceMax", "Min": "ReduceMin"}
    | {"And": "ReduceMin", "Or": "ReduceMax"}
)
# A slice for each place of the window along each axis.
MAX_SLICES: Final = 1024


def numbers(options: Any, name: str) -> list[int]:  # noqa: ANN401 - the schema's classes have no types
    """A vector of an operator's options; a tensor has at most 16 dimensions."""
    count = min(getattr(options, f"{name}Length")(), 32)
    return [int(getattr(options, name)(index)) for index in range(count)]


def compare(op: Operation) -> None:
    """STABLEHLO_COMPARE in one of six directions."""
    options = op.options("StablehloCompareOptions")
    convert = _COMPARISONS.get(options.ComparisonDirection())
    if convert is None or options.CompareType() == _TOTAL_ORDER:
        raise RefusalError("it orders NaN and zeros by their signs")
    convert(op)


def both(logical: str, bits: str) -> Converter:
    """STABLEHLO_AND and STABLEHLO_OR of booleans, or of the bits of integers."""

    def convert(op: Operation) -> None:
        operator = logical if op.input(0).dtype == "bool" else bits
        op.put(op.graph.node(operator, op.value(0), op.value(1)))

    return convert


def remainder(op: Operation) -> None:
    """STABLEHLO_REMAINDER with the dividend's sign."""
    op.put_real(op.graph.node("Mod", op.real(0), op.real(1), fmod=1))


def cube_root(op: Operation) -> None:
    """STABLEHLO_CBRT, which negative numbers have, too."""
    x = op.real(0)
    root = op.graph.node("Pow", op.graph.node("Abs", x), op.graph.constant(1 / 3, "float32"))
    op.put_real(op.graph.node("Mul", op.graph.node("Sign", x), root))


def shift_left(op: Operation) -> None:
    """STABLEHLO_SHIFT_LEFT; by the width or more, nothing is left."""
    x, by = op.value(0), op.value(1)
    dtype = op.graph.dtype_of(x)
    if dtype.kind not in "iu" or dtype.itemsize > 4:
        raise RefusalError(f"expected numbers of at most 32 bits, got {dtype}")
    wide, count = op.cast(x, "uint32"), op.cast(op.cast(by, "int64"), "uint32")
    width = op.graph.constant(8 * dtype.itemsize, "uint32")
    inside = op.graph.node("Less", count, width)
    zero = op.graph.constant(0, "uint32")
    moved = op.graph.node("BitShift", wide, op.graph.node("Where", inside, count, zero), direction="LEFT")
    # Casts of numbers that are too large for the type are not defined.
    if dtype.itemsize < 4:
        moved = op.graph.node("BitwiseAnd", moved, op.graph.constant((1 << 8 * dtype.itemsize) - 1, "uint32"))
    moved = op.graph.node("Where", inside, moved, zero)
    if dtype.kind == "i":
        moved = _signed(op, moved, 8 * dtype.itemsize)
    op.put(op.cast(moved, str(dtype)))


def _signed(op: Operation, value: str, bits: int) -> str:
    wide = op.cast(value, "int64")
    over = op.graph.node("GreaterOrEqual", wide, op.graph.constant(1 << (bits - 1)))
    return op.graph.node("Where", over, op.graph.node("Sub", wide, op.graph.constant(1 << bits)), wide)


def clamp(op: Operation) -> None:
    """STABLEHLO_CLAMP of the second input between the first and the third."""
    low, x, high = (op.real(i) for i in range(3))
    dtype = str(op.graph.dtype_of(x))
    if dtype in SMALL:
        low, x, high = (op.cast(value, "int32") for value in (low, x, high))
    result = op.graph.node("Min", op.graph.node("Max", x, low), high)
    op.put_real(op.cast(result, dtype))


def _declared(op: Operation) -> list[int]:
    """The result's shape, which no operand tells.

    Raises `RefusalError` if the file leaves it open.
    """
    if not op.output.is_static:
        raise RefusalError("the file leaves the shape of its result open")
    return list(op.output.shape)


def reshape(op: Operation) -> None:
    """STABLEHLO_RESHAPE."""
    shape = _declared(op)
    if math.prod(shape) != math.prod(op.shape(0)):
        raise RefusalError(f"expected a shape of {math.prod(op.shape(0))} elements, got {shape}")
    op.move(lambda x, _: op.reshape(x, shape))


def broadcast_in_dim(op: Operation) -> None:
    """STABLEHLO_BROADCAST_IN_DIM: each axis goes to a place among those of the result."""
    places = numbers(op.options("StablehloBroadcastInDimOptions"), "BroadcastDimensions")
    shape, given = _declared(op), op.shape(0)
    if len(set(places)) != len(given) or any(not 0 <= place < len(shape) for place in places):
        raise RefusalError(f"expected {len(given)} of {len(shape)} axes, got {places}")
    between = [1] * len(shape)
    for place, extent in zip(places, given, strict=True):
        between[place] = extent
    order = sorted(range(len(given)), key=lambda axis: places[axis])

    def change(x: str, _: object) -> str:
        x = op.graph.node("Transpose", x, perm=order) if len(order) > 1 else x
        x = op.reshape(x, between)
        dtype = str(op.graph.dtype_of(x))
        x = op.cast(x, "int32") if dtype == "int16" else x
        return op.cast(op.graph.node("Expand", x, op.graph.constant(shape)), dtype)

    op.move(change)


def concatenate(op: Operation) -> None:
    """STABLEHLO_CONCATENATE."""
    axis = op.axis(op.options("StablehloConcatenateOptions").Dimension(), op.scope.rank(op.input(0)))
    op.put_real(op.graph.node("Concat", *(op.real(i) for i in range(op.count)), axis=axis))


def slice_(op: Operation) -> None:
    """STABLEHLO_SLICE from starts to limits in strides."""
    options = op.options("StablehloSliceOptions")
    starts, limits, strides = (numbers(options, f"{n}") for n in ("StartIndices", "LimitIndices", "Strides"))
    shape = op.shape(0)
    if (
        not len(starts) == len(limits) == len(strides) == len(shape)
        or min((*strides, *starts), default=1) < 0
    ):
        raise RefusalError(f"expected a start, a limit and a stride for each axis of {list(shape)}")
    ends = [op.graph.constant(v) for v in (starts, limits, list(range(len(shape))), strides)]
    op.move(lambda x, _: op.graph.node("Slice", x, *ends) if shape else x)


def dynamic_slice(op: Operation) -> None:
    """STABLEHLO_DYNAMIC_SLICE of a known size from places on that are kept inside."""
    sizes = numbers(op.options("StablehloDynamicSliceOptions"), "SliceSizes")
    shape = op.shape(0)
    if len(sizes) != len(shape) or op.count != len(shape) + 1:
        raise RefusalError(f"expected a start and a size for each axis of {list(shape)}, got {sizes}")
    if any(not 0 <= size <= dim for size, dim in zip(sizes, shape, strict=True)):
        raise RefusalError(f"expected at most {list(shape)} elements, got {sizes}")

    def change(x: str, _: object) -> str:
        for axis, (size, dim) in enumerate(zip(sizes, shape, strict=True)):
            if size < dim:
                start = op.reshape(op.cast(op.value(axis + 1), "int64"), (1,))
                start = op.graph.node("Max", start, op.graph.constant([0]))
                start = op.graph.node("Min", start, op.graph.constant([dim - size]))
                places = op.graph.node("Add", start, op.graph.constant(list(range(size))))
                x = op.graph.node("Gather", x, places, axis=axis)
        return x

    op.move(change)


def dynamic_update_slice(op: Operation) -> None:
    """STABLEHLO_DYNAMIC_UPDATE_SLICE from places on that are kept inside."""
    shape = op.shape(0)
    if op.count != len(shape) + 2:
        raise RefusalError(f"expected a start for each axis of {list(shape)}, got {op.count - 2}")
    starts = [op.reshape(op.cast(op.value(axis + 2), "int64"), (1,)) for axis in range(len(shape))]
    update_slice(op, op.graph.node("Concat", *starts, axis=0) if starts else "")


def transpose(op: Operation) -> None:
    """STABLEHLO_TRANSPOSE."""
    order = numbers(op.options("StablehloTransposeOptions"), "Permutation")
    if sorted(order) != list(range(len(op.shape(0)))):
        raise RefusalError(f"expected an order of {len(op.shape(0))} axes, got {order}")
    op.move(lambda x, _: op.graph.node("Transpose", x, perm=order) if order else x)


def iota(op: Operation) -> None:
    """STABLEHLO_IOTA: numbers that count along an axis."""
    shape = _declared(op)
    axis = op.axis(op.options("StablehloIotaOptions").IotaDimension(), len(shape))
    op.graph.check_made(math.prod(shape))
    count = np.arange(shape[axis]).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    op.put(op.graph.constant(np.broadcast_to(count, shape).astype(op.output.dtype or "V1")))


def pad(op: Operation) -> None:
    """STABLEHLO_PAD with a value at the edges and between the elements; what is negative is cut off."""
    options = op.options("StablehloPadOptions")
    shape = list(op.shape(0))
    low, high, inner = (
        numbers(options, name) for name in ("EdgePaddingLow", "EdgePaddingHigh", "InteriorPadding")
    )
    if not len(low) == len(high) == len(inner) == len(shape) or min(inner, default=0) < 0:
        raise RefusalError(f"expected numbers for each axis of {shape}")
    x, filling = op.value(0), op.reshape(op.value(1), ())
    if any(inner):
        x = dilated(op, x, [step + 1 for step in inner], filling)
    if any(v > 0 for v in (*low, *high)):
        x = pad_with(op, x, [max(v, 0) for v in (*low, *high)], filling)
    if any(v < 0 for v in (*low, *high)):
        starts = [max(-v, 0) for v in low]
        sizes = op.graph.shape_of(x)
        stops = [max(size + min(v, 0), 0) for size, v in zip(sizes, high, strict=True)]
        x = op.graph.node("Slice", x, op.graph.constant(starts), op.graph.constant(stops))
    op.put(x)


def dot_general(op: Operation) -> None:
    """STABLEHLO_DOT_GENERAL: batches, then what is left of either operand."""
    options = op.options("StablehloDotGeneralOptions")
    operands, sizes = [], []
    for index, side in enumerate(("Lhs", "Rhs")):
        shape = op.shape(index)
        batch, inner = (numbers(options, f"{side}{name}Dimensions") for name in ("Batching", "Contracting"))
        if not {*batch, *inner} <= set(range(len(shape))):
            raise RefusalError(f"expected axes of {list(shape)}, got {batch} and {inner}")
        free = [axis for axis in range(len(shape)) if axis not in (*batch, *inner)]
        order = [*batch, *free, *inner] if index == 0 else [*batch, *inner, *free]
        batches, rows, columns = ([shape[axis] for axis in axes] for axes in (batch, free, inner))
        ends = [math.prod(rows), math.prod(columns)]
        x = op.graph.node("Transpose", op.real(index), perm=order) if order else op.real(index)
        operands.append(op.reshape(x, [math.prod(batches), *(ends if index == 0 else ends[::-1])]))
        sizes.append((batches, rows, columns))
    if (sizes[0][0], sizes[0][2]) != (sizes[1][0], sizes[1][2]):
        raise RefusalError(f"expected axes that fit, got {list(op.shape(0))} and {list(op.shape(1))}")
    product = op.graph.node("MatMul", *operands)
    op.put_real(op.reshape(product, [*sizes[0][0], *sizes[0][1], *sizes[1][1]]))


def reduce(op: Operation, operator: str) -> None:
    """STABLEHLO_REDUCE of a tensor, beginning with a number; `operator` reduces two numbers to one."""
    if op.count != 2:
        raise RefusalError(f"expected a tensor and a number, got {op.count} inputs")
    axes = numbers(op.options("StablehloReduceOptions"), "Dimensions")
    axes = [op.axis(axis, len(op.shape(0))) for axis in axes]
    x, first = op.real(0), op.reshape(op.real(1), ())
    dtype = str(op.graph.dtype_of(x))
    if dtype in SMALL:
        x, first = op.cast(x, "int32"), op.cast(first, "int32")
    if axes:
        x = op.graph.node(_REDUCTIONS[operator], x, op.graph.constant(axes), keepdims=0)
    # Of numbers that were booleans, "and" is the least.
    pair = {"And": "Min", "Or": "Max"}.get(operator, operator)
    op.put_real(op.cast(op.graph.node(pair, x, first), dtype))


def stablehlo_reduce_window(op: Operation, operator: str) -> None:
    """STABLEHLO_REDUCE_WINDOW of a tensor, beginning with a number."""
    options = op.options("StablehloReduceWindowOptions")
    rank = len(op.shape(0))
    window, strides, base, dilations = (
        numbers(options, name) or [1] * rank
        for name in ("WindowDimensions", "WindowStrides", "BaseDilations", "WindowDilations")
    )
    padding = numbers(options, "Padding") or [0] * (2 * rank)
    if any(step != 1 for step in base):
        raise RefusalError("it puts space between the elements")
    pads = [*padding[::2], *padding[1::2]]  # in the file, both ends of each axis in turn
    _reduce_window(op, operator, window, strides, dilations, pads)


def reduce_window(op: Operation) -> None:
    """REDUCE_WINDOW, whose window, strides and dilations are inputs."""
    operator = _WINDOW_REDUCERS.get(op.options("ReduceWindowOptions").ReduceFunction())
    if operator is None:
        raise RefusalError("its function is unknown")
    window, strides, dilations = (
        op.integers(i, what) for i, what in ((2, "window"), (3, "strides"), (4, "dilations"))
    )
    _reduce_window(op, operator, window, strides, dilations, [0] * (2 * len(op.shape(0))))


def _reduce_window(
    op: Operation,
    operator: str,
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
) -> None:
    """Reduce along one axis after the other: each place of the window is a slice."""
    graph, shape = op.graph, op.shape(0)
    if not len(window) == len(strides) == len(dilations) == len(shape) or len(pads) != 2 * len(shape):
        raise RefusalError(f"expected a window for each axis of {list(shape)}, got {list(window)}")
    if min((*window, *strides, *dilations), default=1) < 1 or min(pads, default=0) < 0:
        raise RefusalError(f"expected a window of at least one element, got {list(window)}")
    if sum(window) > MAX_SLICES:
        raise RefusalError(f"expected a window of at most {MAX_SLICES} elements, got {list(window)}")
    x, first = op.real(0), op.reshape(op.real(1), ())
    dtype = str(graph.dtype_of(x))
    if dtype in SMALL and operator not in ("And", "Or"):
        x, first = op.cast(x, "int32"), op.cast(first, "int32")
    if any(pads):
        x = pad_with(op, x, list(pads), first)
    for axis, (size, stride, dilation) in enumerate(zip(window, strides, dilations, strict=True)):
        extent = graph.shape_of(x)[axis]
        count = (extent - (size - 1) * dilation - 1) // stride + 1
        if count < 1:
            raise RefusalError(f"expected a window that fits into {extent} elements, got {size}")
        parts = []
        for place in itertools.islice(itertools.count(0, dilation), size):
            bounds = [[place], [place + (count - 1) * stride + 1], [axis], [stride]]
            whole = size == stride == 1
            parts.append(x if whole else graph.node("Slice", x, *(graph.constant(v) for v in bounds)))
        x = parts[0]
        for part in parts[1:]:
            x = graph.node(operator, x, part)
    op.put_real(op.cast(graph.node(operator, x, first), dtype))
