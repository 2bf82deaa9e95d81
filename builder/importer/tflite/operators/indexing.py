"""Parts of tensors at indices: GATHER, SCATTER_ND, EMBEDDING_LOOKUP, ONE_HOT, TOPK_V2, segments ..."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from builder.errors import FIX_HINT, RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout

Converter = Callable[[Operation], None]

_LENGTH: Final = "the length of its result depends on values that are only known at run time"


def unique(op: Operation) -> None:
    """UNIQUE numbers of a constant in the order in which they come, and where each element is among them."""
    numbers = op.scope.constant(op.input(0))
    if numbers is None:
        raise RefusalError(_LENGTH, hint=FIX_HINT)
    found, first, places = np.unique(numbers.reshape(-1), return_index=True, return_inverse=True)
    order = np.argsort(first)
    back = np.empty_like(order)
    back[order] = np.arange(order.size)
    op.put(op.graph.constant(found[order]))
    if len(op.outputs) > 1:
        tensor = op.outputs[1]
        op.scope.put(tensor, op.graph.constant(back[places].astype(tensor.dtype or "V1")))


def where(op: Operation) -> None:
    """WHERE a constant is true: the places of the elements, int64 [n, rank]."""
    condition = op.scope.constant(op.input(0))
    if condition is None:
        raise RefusalError(_LENGTH, hint=FIX_HINT)
    op.put(op.graph.constant(np.argwhere(condition).astype(np.int64)))


def gather(op: Operation) -> None:
    """GATHER of slices along an axis; leading axes may be a batch."""
    options = op.options("GatherOptions")
    data, indices = op.shape(0), op.shape(1)
    axis = op.axis(options.Axis(), len(data))
    batch = options.BatchDims()
    batch = batch + len(indices) if batch < 0 else batch
    if not 0 <= batch <= min(axis, len(indices)):
        raise RefusalError(f"expected at most {min(axis, len(indices))} axes of a batch, got {batch}")
    places = op.value(1)
    if not batch:
        op.move(lambda x, _: op.graph.node("Gather", x, places, axis=axis))
        return
    # Each axis of the batch becomes an index of its own.
    order = [*range(batch), axis, *(a for a in range(batch, len(data)) if a != axis)]
    rank = len(indices) - batch
    wide = op.reshape(op.cast(places, "int64"), [*indices, 1])
    between = axis - batch
    back = [
        *range(batch),
        *range(batch + rank, batch + rank + between),
        *range(batch, batch + rank),
        *range(batch + rank + between, len(data) - 1 + rank),
    ]

    def change(x: str, _: Layout) -> str:
        x = op.graph.node("Transpose", x, perm=order)
        x = op.graph.node("GatherND", x, wide, batch_dims=batch)
        return op.graph.node("Transpose", x, perm=back)

    op.move(change)


def gather_nd(op: Operation) -> None:
    """GATHER_ND."""
    places = op.cast(op.value(1), "int64")
    op.move(lambda x, _: op.graph.node("GatherND", x, places))


def embedding_lookup(op: Operation) -> None:
    """EMBEDDING_LOOKUP of ids in a table, which is the second input."""
    table = op.input(1)
    if table.is_quantised and not op.output.is_quantised:
        quantisation = table.quantisation
        assert quantisation is not None
        if not quantisation.is_per_axis:
            rows = op.graph.node("Gather", op.value(1), op.value(0), axis=0)
            op.put(op.scope.dequantise(rows, quantisation, np.dtype(table.dtype)))
            return
        op.put(op.graph.node("Gather", op.real(1), op.value(0), axis=0))
        return
    op.put(op.graph.node("Gather", op.value(1), op.value(0), axis=0))


def scatter_nd(op: Operation) -> None:
    """SCATTER_ND of indices, updates and a shape; updates of one place are added."""
    shape = op.integers(2, "shape")
    if min((*shape, 0)) < 0:
        raise RefusalError(f"expected a shape, got {shape}")
    updates = op.value(1)
    dtype = str(op.graph.dtype_of(updates))
    narrow = dtype in ("int8", "uint8", "int16", "bool")
    if narrow:
        updates = op.cast(updates, "int32")
    zeros = _filled(op, shape, 0, str(op.graph.dtype_of(updates)))
    result = op.graph.node("ScatterND", zeros, op.cast(op.value(0), "int64"), updates, reduction="add")
    op.put(op.cast(result, dtype))


def _filled(op: Operation, shape: list[int], number: float, dtype: str) -> str:
    return op.graph.node("Expand", op.graph.constant(number, dtype), op.graph.constant(shape))


def sparse_to_dense(op: Operation) -> None:
    """SPARSE_TO_DENSE of indices, a shape, values and what is elsewhere."""
    shape = op.integers(1, "shape")
    if min((*shape, 0)) < 0:
        raise RefusalError(f"expected a shape, got {shape}")
    indices = op.shape(0)
    count = 1 if not indices else indices[0]
    depth = indices[1] if len(indices) == 2 else 1
    places = op.reshape(op.cast(op.value(0), "int64"), [count, depth])
    values = op.value(2)
    if not op.shape(2):
        values = op.graph.node("Expand", values, op.graph.constant([count]))
    rest = op.graph.node("Expand", op.reshape(op.value(3), ()), op.graph.constant(shape))
    op.put(op.graph.node("ScatterND", rest, places, op.reshape(values, [count])))


def one_hot(op: Operation) -> None:
    """ONE_HOT; an index that is negative or too large gives a row of off values, unlike in ONNX."""
    [depth] = op.integers(1, "depth")
    rank = op.scope.rank(op.input(0))
    axis = op.options("OneHotOptions").Axis()
    axis = rank if axis == -1 else op.axis(axis, rank + 1)
    op.graph.check_made(depth)
    if depth < 0:
        raise RefusalError(f"expected a depth of 0 or more, got {depth}")
    shape = list(op.shape(0))
    shape.insert(axis, 1)
    places = op.reshape(op.cast(op.value(0), "int64"), shape)
    wanted = np.arange(depth, dtype=np.int64).reshape([depth if a == axis else 1 for a in range(rank + 1)])
    hit = op.graph.node("Equal", places, op.graph.constant(wanted))
    on, off = (op.reshape(op.value(i), ()) for i in (2, 3))
    op.put(op.where(hit, on, off))


def topk_v2(op: Operation) -> None:
    """TOPK_V2: the largest elements of the last axis, and their indices."""
    [k] = op.integers(1, "number of elements")
    if len(op.outputs) != 2 or not op.shape(0):
        raise RefusalError("expected two outputs and at least one dimension")
    if not 0 <= k <= op.shape(0)[-1]:
        raise RefusalError(f"expected at most {op.shape(0)[-1]} elements, got {k}")
    x = op.real(0)
    dtype = str(op.graph.dtype_of(x))
    if dtype in ("int8", "uint8", "int16"):
        x = op.cast(x, "int32")
    values, indices = op.graph.nodes("TopK", [x, op.graph.constant([k])], 2, axis=-1)
    op.scope.put_real(op.outputs[0], op.cast(values, dtype))
    op.scope.put(op.outputs[1], op.cast(indices, op.outputs[1].dtype or "int32"))


def segments(reduction: str, *, is_sorted: bool = False) -> Converter:
    """SEGMENT_SUM and UNSORTED_SEGMENT_SUM, _PROD, _MAX and _MIN: rows with one number are combined.

    Rows with a negative number are left out.
    """

    def convert(op: Operation) -> None:
        data, ids = op.shape(0), op.shape(1)
        if data[: len(ids)] != ids or len(ids) != 1:
            raise RefusalError(f"expected a number for each row of {list(data)}, got {list(ids)}")
        if is_sorted:
            known = op.integers(1, "numbers of segments")
            count = max(known, default=-1) + 1
        else:
            [count] = op.integers(2, "number of segments")
        if not 0 <= count <= 1 << 24:
            raise RefusalError(f"expected at most {1 << 24} segments, got {count}")
        x = op.value(0)
        dtype = op.graph.dtype_of(x)
        limits = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
        empty = {"add": 0, "mul": 1, "max": limits.min, "min": limits.max}[reduction]
        places = op.cast(op.value(1), "int64")
        outside = op.graph.node("Less", places, op.graph.constant(np.zeros((), np.int64)))
        places = op.graph.node("Where", outside, op.graph.constant(np.asarray(count, np.int64)), places)
        start = _filled(op, [count + 1, *data[1:]], empty, str(dtype))
        result = op.graph.node("ScatterND", start, op.reshape(places, [*ids, 1]), x, reduction=reduction)
        op.put(op.graph.node("Slice", result, op.graph.constant([0]), op.graph.constant([count])))

    return convert


def bucketize(op: Operation) -> None:
    """BUCKETIZE: how many boundaries are at most as large."""
    options = op.options("BucketizeOptions")
    if options.BoundariesIsNone():
        raise RefusalError("expected boundaries, got none")
    bounds = np.asarray(options.BoundariesAsNumpy(), np.float32)
    x = op.value(0)
    dtype = str(op.graph.dtype_of(x))
    if dtype != "float32":
        x = op.cast(x, "float64")
        bounds = bounds.astype(np.float64)
    shape = op.graph.shape_of(x)
    wide = op.reshape(x, [*shape, 1])
    above = op.cast(op.graph.node("GreaterOrEqual", wide, op.graph.constant(bounds)), "int32")
    op.put(op.graph.node("ReduceSum", above, op.graph.constant([len(shape)]), keepdims=0))


def matrix_diag(op: Operation) -> None:
    """MATRIX_DIAG: a square with the last axis on its diagonal, and zeros elsewhere."""
    shape = op.shape(0)
    op.graph.check_made(shape[-1] ** 2)
    mask = op.graph.constant(np.eye(shape[-1], dtype=bool))
    x = op.reshape(op.value(0), [*shape, 1])
    op.put(op.where(mask, x, op.graph.constant(0, str(op.graph.dtype_of(x)))))


def matrix_set_diag(op: Operation) -> None:
    """MATRIX_SET_DIAG: a matrix with another diagonal."""
    shape = op.shape(0)
    if len(shape) < 2:
        raise RefusalError(f"expected matrices, got {list(shape)}")
    rows, columns = shape[-2:]
    least = min(rows, columns)
    op.graph.check_made(rows * columns)
    mask = op.graph.constant(np.eye(rows, columns, dtype=bool))
    diagonal = op.value(1)
    if columns > rows:
        diagonal = op.reshape(diagonal, [*shape[:-2], least, 1])
    else:
        diagonal = op.reshape(diagonal, [*shape[:-2], 1, least])
    op.put(op.where(mask, diagonal, op.value(0)))
