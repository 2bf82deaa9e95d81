"""Tensors made of shapes and numbers: SHAPE, RANK, RANGE, FILL, ZEROS_LIKE, BROADCAST_ARGS."""

from __future__ import annotations

import math

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation


def shape(op: Operation) -> None:
    """SHAPE, which is known."""
    if op.output.dtype not in ("int32", "int64"):
        raise RefusalError(f"its result is {op.output.type_name}")
    op.put(op.graph.constant(np.asarray(op.shape(0), op.output.dtype)))


def rank(op: Operation) -> None:
    """RANK, which is known."""
    op.put(op.graph.constant(np.asarray(len(op.shape(0)), np.int32)))


def range_(op: Operation) -> None:
    """RANGE of a start, a limit and a step that are known."""
    ends = [
        op.scope.known(op.input(i), what).reshape(()) for i, what in enumerate(("start", "limit", "step"))
    ]
    if ends[2] == 0:
        raise RefusalError("expected a step other than 0")
    count = max(int(np.ceil((ends[1].astype(np.float64) - ends[0]) / ends[2])), 0)
    op.graph.check_made(count)
    numbers = ends[0] + np.arange(count).astype(ends[0].dtype) * ends[2]
    op.put(op.graph.constant(numbers.astype(ends[0].dtype)))


def fill(op: Operation) -> None:
    """FILL a shape with a number."""
    wanted = op.integers(0, "shape")
    if min((*wanted, 0)) < 0:
        raise RefusalError(f"expected a shape, got {wanted}")
    _expand(op, op.reshape(op.value(1), ()), wanted)


def zeros_like(op: Operation) -> None:
    """ZEROS_LIKE."""
    if op.input(0).is_quantised:
        raise RefusalError("its numbers have a scale")
    _expand(op, op.graph.constant(0, op.output.dtype or "float32"), list(op.shape(0)))


def _expand(op: Operation, number: str, wanted: list[int]) -> None:
    dtype = str(op.graph.dtype_of(number))
    if dtype == "int16":
        number = op.cast(number, "int32")
    op.put(op.cast(op.graph.node("Expand", number, op.graph.constant(wanted)), dtype))


def broadcast_args(op: Operation) -> None:
    """BROADCAST_ARGS: the shape that two shapes broadcast to, whose lengths are known."""
    if any(op.scope.constant(op.input(i)) is None for i in (0, 1)):
        op.put(_broadcast_at_run_time(op))
        return
    first, second = op.integers(0, "shape"), op.integers(1, "shape")
    try:
        found = np.broadcast_shapes(tuple(first), tuple(second))
    except ValueError as error:
        raise RefusalError(f"expected shapes that broadcast, got {first} and {second}") from error
    op.put(op.graph.constant(np.asarray(found, op.output.dtype or "int32")))


def _broadcast_at_run_time(op: Operation) -> str:
    graph = op.graph
    rank = max(math.prod(op.shape(i)) for i in (0, 1))
    shapes = []
    for index in (0, 1):
        count = math.prod(op.shape(index))
        ones = graph.constant(np.ones(rank - count, graph.dtype_of(op.value(index))))
        shapes.append(graph.node("Concat", ones, op.reshape(op.value(index), (count,)), axis=0))
    first, second = shapes
    one = graph.constant(np.ones((), graph.dtype_of(first)))
    return graph.node("Where", graph.node("Equal", first, one), second, first)
