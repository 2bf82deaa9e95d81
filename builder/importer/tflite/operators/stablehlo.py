"""Operators of StableHLO that LiteRT has kernels for, and REDUCE_WINDOW. Nothing is broadcast.

Source: StableHLO specification (openxla.org/stablehlo/spec).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import SMALL, Operation
from builder.importer.tflite.operators.shaping import dilated, pad_with

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
# A slice for each place of the window along each axis.
MAX_SLICES: Final = 1024


def numbers(options: Any, name: str) -> list[int]:  # noqa: ANN401 - the schema's classes have no types
    """A vector of an operator's options; a tensor has at most 16 dimensions."""
    count = min(getattr(options, f"{name}Length")(), 32)
    return [int(getattr(options, name)(index)) for index in range(count)]


def and_(op: Operation) -> None:
    """STABLEHLO_AND of booleans, or of the bits of integers."""
    operator = "And" if op.input(0).dtype == "bool" else "BitwiseAnd"
    op.put(op.graph.node(operator, op.value(0), op.value(1)))


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
