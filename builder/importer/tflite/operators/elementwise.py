"""Element by element: arithmetic, comparisons, logic, functions of one number, CAST and SELECT."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.graph_builder import element_type
from builder.importer.tflite.operation import SMALL, Operation
from builder.importer.tflite.scope import Layout

Converter = Callable[[Operation], None]

_FUSED: Final = {"Add": "AddOptions", "Sub": "SubOptions", "Mul": "MulOptions", "Div": "DivOptions"}


def _operands(op: Operation) -> tuple[str, str, Layout]:
    """Real numbers of both operands, and the layout of the result."""
    layout = op.layout()
    rank = max(op.scope.rank(op.input(0)), op.scope.rank(op.input(1)))
    first, second = (op.scope.operand(op.input(i), rank, layout) for i in (0, 1))
    return first, second, layout


def _numbers(op: Operation) -> tuple[str, str, Layout]:
    """Both operands as the file stores them, and the layout of the result."""
    layout = op.layout()
    rank = max(op.scope.rank(op.input(0)), op.scope.rank(op.input(1)))
    first, second = (op.scope.numbers(op.input(i), rank, layout) for i in (0, 1))
    return first, second, layout


def arithmetic(operator: str) -> Converter:
    """ADD, SUB, MUL and DIV, with a fused activation."""

    def convert(op: Operation) -> None:
        first, second, layout = _operands(op)
        result = op.graph.node(operator, first, second)
        activation = op.options(_FUSED[operator]).FusedActivationFunction()
        op.put_real(op.activate(result, activation), layout)

    return convert


def binary(operator: str) -> Converter:
    """An operator of two numbers that ONNX has too."""

    def convert(op: Operation) -> None:
        first, second, layout = _operands(op)
        dtype = str(op.graph.dtype_of(first))
        if operator in ("Max", "Min") and dtype in SMALL:
            first, second = op.cast(first, "int32"), op.cast(second, "int32")
        op.put_real(op.cast(op.graph.node(operator, first, second), dtype), layout)

    return convert


def comparison(operator: str, *, negated: bool = False) -> Converter:
    """A comparison; its result is boolean."""

    def convert(op: Operation) -> None:
        first, second, layout = _operands(op)
        if op.input(0).is_quantised:  # LiteRT compares multiples of 1/256, whatever the scales
            parts = op.graph.constant(256, "float32")
            first, second = (op.graph.node("Round", op.graph.node("Mul", x, parts)) for x in (first, second))
        elif str(op.graph.dtype_of(first)) in SMALL:
            first, second = op.cast(first, "int32"), op.cast(second, "int32")
        result = op.graph.node(operator, first, second)
        op.put(op.graph.node("Not", result) if negated else result, layout)

    return convert


def logical(operator: str) -> Converter:
    """LOGICAL_AND and LOGICAL_OR."""

    def convert(op: Operation) -> None:
        first, second, layout = _numbers(op)
        op.put(op.graph.node(operator, first, second), layout)

    return convert


def unary(*operators: str, takes_negative: bool = True) -> Converter:
    """A function of one number, or several in turn, that ONNX has too.

    `takes_negative`: if not, quantised numbers below 0 count as 0, as LiteRT's tables have them.
    """

    def convert(op: Operation) -> None:
        layout = op.layout()
        value = op.real(0, layout)
        for operator in operators if takes_negative or not op.input(0).is_quantised else ("Relu", *operators):
            value = op.graph.node(operator, value)
        op.put_real(value, layout)

    return convert


def square(op: Operation) -> None:
    """SQUARE: x * x."""
    layout = op.layout()
    x = op.real(0, layout)
    op.put_real(op.graph.node("Mul", x, x), layout)


def squared_difference(op: Operation) -> None:
    """SQUARED_DIFFERENCE: (x - y)²."""
    first, second, layout = _operands(op)
    difference = op.graph.node("Sub", first, second)
    op.put_real(op.graph.node("Mul", difference, difference), layout)


def floor_div(op: Operation) -> None:
    """FLOOR_DIV: the quotient of the numbers, whatever their scale, rounded down."""
    first, second, layout = _numbers(op)
    dtype = str(op.graph.dtype_of(first))
    if dtype == "float32":
        op.put(op.graph.node("Floor", op.graph.node("Div", first, second)), layout)
        return
    if dtype in SMALL:
        first, second = op.cast(first, "int32"), op.cast(second, "int32")
    zero = op.graph.constant(np.zeros((), op.graph.dtype_of(first)))
    differs = op.graph.node("Xor", op.graph.node("Less", first, zero), op.graph.node("Less", second, zero))
    whole = op.graph.node("Equal", op.graph.node("Mod", first, second), zero)
    below = op.graph.node("And", differs, op.graph.node("Not", whole))
    quotient = op.graph.node("Div", first, second)
    quotient = op.graph.node("Sub", quotient, op.cast(below, str(op.graph.dtype_of(first))))
    op.put(op.cast(quotient, dtype), layout)


def floor_mod(op: Operation) -> None:
    """FLOOR_MOD: the remainder of the numbers, whatever their scale, with the divisor's sign."""
    first, second, layout = _numbers(op)
    if op.graph.dtype_of(first).kind != "f":
        op.put(op.graph.node("Mod", first, second), layout)
        return
    rest = op.graph.node("Mod", first, second, fmod=1)
    zero = op.graph.constant(np.zeros((), np.float32))
    differs = op.graph.node("Xor", op.graph.node("Less", second, zero), op.graph.node("Less", rest, zero))
    moved = op.graph.node("And", differs, op.graph.node("Not", op.graph.node("Equal", rest, zero)))
    op.put_real(op.graph.node("Where", moved, op.graph.node("Add", rest, second), rest), layout)


def atan2(op: Operation) -> None:
    """ATAN2 of y and x: the angle of the point (x, y)."""
    y, x, layout = _operands(op)
    zero = op.graph.constant(np.zeros((), np.float32))
    left = op.graph.node("Less", x, zero)
    below = op.graph.node("Less", y, zero)
    turn = op.graph.node(
        "Where", below, op.graph.constant(-math.pi, "float32"), op.graph.constant(math.pi, "float32")
    )
    angle = op.graph.node("Atan", op.graph.node("Div", y, x))
    angle = op.graph.node("Add", angle, op.graph.node("Where", left, turn, zero))
    # At x = 0, the quotient is infinite, or not a number at the origin, whose angle is 0.
    origin = op.graph.node("And", op.graph.node("Equal", x, zero), op.graph.node("Equal", y, zero))
    op.put_real(op.graph.node("Where", origin, zero, angle), layout)


def add_n(op: Operation) -> None:
    """ADD_N: the sum of all inputs."""
    layout = op.layout()
    total = op.real(0, layout)
    for index in range(1, op.count):
        total = op.graph.node("Add", total, op.real(index, layout))
    op.put_real(total, layout)


def right_shift(op: Operation) -> None:
    """RIGHT_SHIFT: an arithmetic shift, which rounds down. Shifts beyond the width are those by the width."""
    first, second, layout = _numbers(op)
    dtype = op.graph.dtype_of(first)
    if dtype.itemsize > 4:
        raise RefusalError("its numbers have 64 bits")
    most = op.graph.constant(8 * dtype.itemsize - 1, "float64")
    least = op.graph.constant(0, "float64")
    by = op.graph.node("Clip", op.cast(second, "float64"), least, most)
    scale = op.graph.node("Pow", op.graph.constant(2, "float64"), by)
    result = op.graph.node("Floor", op.graph.node("Div", op.cast(first, "float64"), scale))
    op.put(op.cast(result, str(dtype)), layout)


def bitwise_xor(op: Operation) -> None:
    """BITWISE_XOR."""
    first, second, layout = _numbers(op)
    operator = "Xor" if op.graph.dtype_of(first).kind == "b" else "BitwiseXor"
    op.put(op.graph.node(operator, first, second), layout)


def cast(op: Operation) -> None:
    """CAST of numbers, whatever their scale."""
    layout = op.layout()
    if not op.output.dtype or op.output.dtype == "V1":
        raise RefusalError(f"its result is {op.output.type_name}")
    op.put(op.cast(op.value(0, layout), op.output.dtype), layout)


def bitcast(op: Operation) -> None:
    """BITCAST of the numbers, whatever their scale: the same bits as another type of the same size."""
    layout = op.layout()
    value = op.value(0, layout)
    if not op.output.dtype:
        raise RefusalError(f"its result is {op.output.type_name}")
    before, after = op.graph.dtype_of(value), np.dtype(op.output.dtype)
    if before.itemsize != after.itemsize or "b" in (before.kind, after.kind):
        raise RefusalError(f"expected types of the same size, got {before} and {after}")
    op.put(value if before == after else op.graph.node("BitCast", value, to=element_type(str(after))), layout)


def select(op: Operation) -> None:
    """SELECT: the condition has the operands' shape, or one element per row of theirs."""
    rank, own = op.scope.rank(op.input(1)), op.scope.rank(op.input(0))
    condition = op.value(0)
    if own == 1 and rank > 1:
        condition = op.reshape(condition, (*op.shape(0), *[1] * (rank - 1)))
    op.put_real(op.where(condition, op.real(1), op.real(2)))


def select_v2(op: Operation) -> None:
    """SELECT_V2: all three are broadcast."""
    layout = op.layout()
    rank = max(op.scope.rank(tensor) for tensor in op.inputs())
    condition = op.scope.numbers(op.input(0), rank, layout)
    first, second = (op.scope.operand(op.input(i), rank, layout) for i in (1, 2))
    op.put_real(op.where(condition, first, second), layout)
