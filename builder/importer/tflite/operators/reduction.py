"""Along axes: MEAN, SUM and other reductions, ARG_MAX, ARG_MIN, CUMSUM."""

from __future__ import annotations

from collections.abc import Callable

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import LEAST_RANK, Layout, axis_in

Converter = Callable[[Operation], None]


def reduce(operator: str) -> Converter:
    """MEAN, SUM, REDUCE_PROD, REDUCE_MAX, REDUCE_MIN, and with booleans REDUCE_ANY and REDUCE_ALL."""

    def convert(op: Operation) -> None:
        shape = op.shape(0)
        rank = len(shape)
        keep = bool(op.options("ReducerOptions").KeepDims())
        axes = sorted({op.axis(axis, rank) for axis in op.integers(1, "axes")}) if rank else []
        layout = op.layout()
        result_layout = layout
        if not keep and layout is Layout.FIRST:
            if 0 in axes and rank - len(axes) >= 2:
                layout = Layout.LAST  # the channels would become the batch
            result_layout = layout
            if rank - 1 in axes or rank - len(axes) < LEAST_RANK:
                result_layout = Layout.LAST
        x = op.real(0, layout)
        dtype = str(op.graph.dtype_of(x))
        if dtype in ("bool", "int8", "uint8", "int16") or (dtype == "int64" and operator == "ReduceMean"):
            x = op.cast(x, "int32")
        if not axes:
            op.put_real(op.cast(x, dtype), layout)
            return
        if operator == "ReduceMean" and dtype in ("int32", "int64"):
            x = op.cast(x, "float64")  # rounds towards zero, as the interpreter does
        where = op.graph.constant([axis_in(layout, axis, rank) for axis in axes])
        result = op.graph.node(operator, x, where, keepdims=int(keep))
        op.put_real(op.cast(result, dtype), result_layout)

    return convert


def arg(operator: str, options: str) -> Converter:
    """ARG_MAX and ARG_MIN: the first index of the largest or smallest element."""

    def convert(op: Operation) -> None:
        [axis] = op.integers(1, "axis")
        rank = op.scope.rank(op.input(0))
        axis = op.axis(axis, rank)
        if op.output.dtype not in ("int32", "int64"):
            raise RefusalError(f"its result is {op.output.type_name}")
        op.options(options)
        x = op.real(0)
        if str(op.graph.dtype_of(x)) in ("bool", "int16"):
            x = op.cast(x, "int32")
        elif str(op.graph.dtype_of(x)) == "int64":
            raise RefusalError("its numbers have 64 bits")
        found = op.graph.node(operator, x, axis=axis, keepdims=0, select_last_index=0)
        op.put(op.cast(found, op.output.dtype))

    return convert


def cumsum(op: Operation) -> None:
    """CUMSUM along an axis."""
    options = op.options("CumsumOptions")
    [axis] = op.integers(1, "axis")
    axis = op.axis(axis, op.scope.rank(op.input(0)))
    result = op.graph.node(
        "CumSum",
        op.real(0),
        op.graph.constant(axis),
        exclusive=int(options.Exclusive()),
        reverse=int(options.Reverse()),
    )
    op.put_real(result)
