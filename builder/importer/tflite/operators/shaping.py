"""Other shapes and orders: RESHAPE, TRANSPOSE, CONCATENATION, SPLIT, PACK, TILE, blocks and space ..."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout, axis_in, to_first, to_last
from builder.importer.tflite.tensor import Tensor


def reshape(op: Operation) -> None:
    """RESHAPE to a shape that is an input or an option; one dimension may be -1."""
    shape: list[int] | None = None
    second = op.optional(1)
    if second is not None and op.scope.constant(second) is not None:
        shape = op.integers(1, "shape")
    elif op.operator.options is not None and not op.options("ReshapeOptions").NewShapeIsNone():
        found = op.options("ReshapeOptions")
        shape = [int(found.NewShape(i)) for i in range(min(found.NewShapeLength(), 16))]
    elif second is not None:
        op.integers(1, "shape")
    if shape is None:
        raise RefusalError("expected a shape, got none")
    count = math.prod(op.shape(0))
    if shape == [0] and count == 1:
        shape = []  # how old converters wrote a scalar
    known = math.prod(dim for dim in shape if dim != -1)
    if shape.count(-1) == 1 and known > 0:
        shape = [count // known if dim == -1 else dim for dim in shape]
    if any(dim < 0 for dim in shape) or math.prod(shape) != count:
        raise RefusalError(f"expected a shape of {count} elements, got {shape}")
    op.move(lambda x, _: op.reshape(x, shape))


def squeeze(op: Operation) -> None:
    """SQUEEZE of the axes in the options, or of all with one element."""
    options = op.options("SqueezeOptions")
    shape = op.shape(0)
    axes = {op.axis(options.SqueezeDims(i), len(shape)) for i in range(min(options.SqueezeDimsLength(), 16))}
    axes = axes or {axis for axis, dim in enumerate(shape) if dim == 1}
    if any(shape[axis] != 1 for axis in axes):
        raise RefusalError(f"expected axes of one element, got {sorted(axes)} of {list(shape)}")
    op.move(lambda x, _: op.reshape(x, [dim for axis, dim in enumerate(shape) if axis not in axes]))


def expand_dims(op: Operation) -> None:
    """EXPAND_DIMS: a new axis of one element."""
    shape = list(op.shape(0))
    [axis] = op.integers(1, "axis")
    shape.insert(op.axis(axis, len(shape) + 1), 1)
    op.move(lambda x, _: op.reshape(x, shape))


def transpose(op: Operation) -> None:
    """TRANSPOSE. One that only moves the channels costs nothing: the other layout is the result."""
    order = op.integers(1, "order of axes")
    rank = op.scope.rank(op.input(0))
    order = [op.axis(axis, rank) for axis in order]
    if sorted(order) != list(range(rank)):
        raise RefusalError(f"expected an order of {rank} axes, got {order}")
    x, y = op.input(0), op.output
    if op.is_move():
        if rank > 2 and tuple(order) == to_first(rank):
            op.scope.put(y, op.scope.value(x, Layout.FIRST))
            return
        if rank > 2 and tuple(order) == to_last(rank):
            op.scope.put(y, op.scope.value(x), Layout.FIRST)
            return
    op.move(lambda value, _: op.graph.node("Transpose", value, perm=order))


def concatenation(op: Operation) -> None:
    """CONCATENATION; quantised inputs may have other scales than the output."""
    options = op.options("ConcatenationOptions")
    rank = op.scope.rank(op.input(0))
    axis = op.axis(options.Axis(), rank)
    tensors = op.inputs()
    layout = op.scope.layout_of(*tensors)
    first = op.output.quantisation
    same = not op.output.is_quantised or all(
        first is not None and first.equals(tensor.quantisation) for tensor in tensors
    )
    get = op.scope.value if same and not options.FusedActivationFunction() else op.scope.real
    joined = op.graph.node("Concat", *(get(t, layout) for t in tensors), axis=axis_in(layout, axis, rank))
    if get == op.scope.value:
        op.put(joined, layout)
    else:
        op.put_real(op.activate(joined, options.FusedActivationFunction()), layout)


def split(op: Operation) -> None:
    """SPLIT of the second input along the first, into equal parts."""
    [axis] = op.integers(0, "axis")
    rank = op.scope.rank(op.input(1))
    count = len(op.outputs)
    axis = op.axis(axis, rank)
    extent = op.shape(1)[axis]
    if not count or extent % count:
        raise RefusalError(f"expected a multiple of {count} elements, got {extent}")
    _split(op, op.input(1), axis, [extent // count] * count)


def split_v(op: Operation) -> None:
    """SPLIT_V into parts of given sizes; one may be -1."""
    sizes = op.integers(1, "sizes")
    [axis] = op.integers(2, "axis")
    axis = op.axis(axis, op.scope.rank(op.input(0)))
    extent = op.shape(0)[axis]
    if sizes.count(-1) == 1:
        sizes = [extent - sum(sizes) - 1 if size == -1 else size for size in sizes]
    if len(sizes) != len(op.outputs) or min(sizes, default=-1) < 0 or sum(sizes) != extent:
        raise RefusalError(f"expected {len(op.outputs)} sizes that add up to {extent}, got {sizes}")
    _split(op, op.input(0), axis, sizes)


def _split(op: Operation, tensor: Tensor, axis: int, sizes: Sequence[int]) -> None:
    layout = op.scope.layout_of(tensor)
    rank = op.scope.rank(tensor)
    moves = _moves(tensor, *op.outputs)
    value = op.scope.value(tensor, layout) if moves else op.scope.real(tensor, layout)
    parts = op.graph.nodes(
        "Split", [value, op.graph.constant(list(sizes))], len(sizes), axis=axis_in(layout, axis, rank)
    )
    for output, part in zip(op.outputs, parts, strict=True):
        (op.scope.put if moves else op.scope.put_real)(output, part, layout)


def _moves(first: Tensor, *others: Tensor) -> bool:
    return not first.is_quantised or all(
        first.quantisation is not None and first.quantisation.equals(other.quantisation) for other in others
    )


def pack(op: Operation) -> None:
    """PACK: tensors of one shape along a new axis."""
    shape = list(op.shape(0))
    axis = op.axis(op.options("PackOptions").Axis(), len(shape) + 1)
    tensors = op.inputs()
    moves = all(_moves(tensor, op.output) for tensor in tensors)
    get = op.scope.value if moves else op.scope.real
    wider = [*shape[:axis], 1, *shape[axis:]]
    joined = op.graph.node("Concat", *(op.reshape(get(tensor), wider) for tensor in tensors), axis=axis)
    (op.put if moves else op.put_real)(joined)


def unpack(op: Operation) -> None:
    """UNPACK: the slices along an axis, without that axis."""
    shape = list(op.shape(0))
    axis = op.axis(op.options("UnpackOptions").Axis(), len(shape))
    if shape[axis] != len(op.outputs) or not op.outputs:
        raise RefusalError(f"expected {len(op.outputs)} slices, got {shape[axis]}")
    moves = _moves(op.input(0), *op.outputs)
    value = op.value(0) if moves else op.real(0)
    sizes = op.graph.constant([1] * len(op.outputs))
    parts = op.graph.nodes("Split", [value, sizes], len(op.outputs), axis=axis)
    for output, part in zip(op.outputs, parts, strict=True):
        narrow = op.reshape(part, shape[:axis] + shape[axis + 1 :])
        (op.scope.put if moves else op.scope.put_real)(output, narrow)


def tile(op: Operation) -> None:
    """TILE: repeat along each axis."""
    repeats = op.integers(1, "numbers of repeats")
    if len(repeats) != op.scope.rank(op.input(0)) or min(repeats, default=0) < 0:
        raise RefusalError(f"expected a number for each axis of {list(op.shape(0))}, got {repeats}")
    op.move(lambda x, _: _wide(op, x, "Tile", op.graph.constant(repeats)), "Tile")


def broadcast_to(op: Operation) -> None:
    """BROADCAST_TO a shape."""
    shape = op.integers(1, "shape")
    if min(shape, default=0) < 0:
        raise RefusalError(f"expected a shape, got {shape}")
    op.move(lambda x, _: _wide(op, x, "Expand", op.graph.constant(shape)), "Expand")


def _wide(op: Operation, value: str, operator: str, *inputs: str) -> str:
    """Add a node; ONNX Runtime's kernels for it lack 16-bit numbers."""
    dtype = str(op.graph.dtype_of(value))
    if dtype in ("int16", "uint16"):
        return op.cast(op.graph.node(operator, op.cast(value, "int32"), *inputs), dtype)
    return op.graph.node(operator, value, *inputs)


def space_to_depth(op: Operation) -> None:
    """SPACE_TO_DEPTH of a picture [n, h, w, c]."""
    size = op.options("SpaceToDepthOptions").BlockSize()
    _check_block(op, size)
    shape = op.shape(0)
    if shape[1] % size or shape[2] % size:
        raise RefusalError(f"expected multiples of {size} pixels, got {list(shape)}")
    op.put_real(op.graph.node("SpaceToDepth", op.real(0, Layout.FIRST), blocksize=size), Layout.FIRST)


def depth_to_space(op: Operation) -> None:
    """DEPTH_TO_SPACE of a picture [n, h, w, c]."""
    size = op.options("DepthToSpaceOptions").BlockSize()
    _check_block(op, size)
    if op.shape(0)[3] % (size * size):
        raise RefusalError(f"expected a multiple of {size * size} channels, got {op.shape(0)[3]}")
    op.put_real(
        op.graph.node("DepthToSpace", op.real(0, Layout.FIRST), blocksize=size, mode="DCR"), Layout.FIRST
    )


def _check_block(op: Operation, size: int) -> None:
    if op.scope.rank(op.input(0)) != 4 or size < 1:
        raise RefusalError(f"expected a picture and a block of 1 or more, got {list(op.shape(0))} and {size}")


def space_to_batch_nd(op: Operation) -> None:
    """SPACE_TO_BATCH_ND: blocks of pixels become parts of the batch; the edges are padded with zeros."""
    shape = list(op.shape(0))
    block = op.integers(1, "block")
    edges = op.integers(2, "padding")
    spatial = len(block)
    if len(shape) < spatial + 1 or len(edges) != 2 * spatial or min((*block, 1)) < 1 or min((*edges, 0)) < 0:
        raise RefusalError(f"expected a block and its padding for {list(shape)}, got {block} and {edges}")
    padded = [dim + edges[2 * i] + edges[2 * i + 1] for i, dim in enumerate(shape[1 : spatial + 1])]
    if any(dim % size for dim, size in zip(padded, block, strict=True)):
        raise RefusalError(f"expected multiples of {block} pixels, got {padded}")
    rest = shape[spatial + 1 :]
    split = [d for dim, size in zip(padded, block, strict=True) for d in (dim // size, size)]
    order = [2 * i + 2 for i in range(spatial)] + [0] + [2 * i + 1 for i in range(spatial)]
    order += [2 * spatial + 1 + i for i in range(len(rest))]
    result = [
        shape[0] * math.prod(block),
        *(dim // size for dim, size in zip(padded, block, strict=True)),
        *rest,
    ]
    pads = [0, *edges[0::2], *[0] * len(rest), 0, *edges[1::2], *[0] * len(rest)]

    def change(x: str, _: Layout) -> str:
        x = pad_with_zero(op, x, op.input(0), pads)
        x = op.reshape(x, [shape[0], *split, *rest])
        return op.reshape(op.graph.node("Transpose", x, perm=order), result)

    op.move(change)


def batch_to_space_nd(op: Operation) -> None:
    """BATCH_TO_SPACE_ND: the inverse of SPACE_TO_BATCH_ND; the edges are cropped."""
    shape = list(op.shape(0))
    block = op.integers(1, "block")
    crops = op.integers(2, "crop")
    spatial = len(block)
    if len(shape) < spatial + 1 or len(crops) != 2 * spatial or min((*block, 1)) < 1 or min((*crops, 0)) < 0:
        raise RefusalError(f"expected a block and its crop for {list(shape)}, got {block} and {crops}")
    if shape[0] % math.prod(block):
        raise RefusalError(f"expected a multiple of {math.prod(block)} pictures, got {shape[0]}")
    rest = shape[spatial + 1 :]
    batch = shape[0] // math.prod(block)
    order = [spatial] + [a for i in range(spatial) for a in (spatial + 1 + i, i)]
    order += [2 * spatial + 1 + i for i in range(len(rest))]
    whole = [dim * size for dim, size in zip(shape[1 : spatial + 1], block, strict=True)]
    ends = [dim - crops[2 * i + 1] for i, dim in enumerate(whole)]

    def change(x: str, _: Layout) -> str:
        x = op.reshape(x, [*block, batch, *shape[1:]])
        x = op.reshape(op.graph.node("Transpose", x, perm=order), [batch, *whole, *rest])
        axes = list(range(1, spatial + 1))
        return op.graph.node(
            "Slice", x, op.graph.constant(crops[0::2]), op.graph.constant(ends), op.graph.constant(axes)
        )

    op.move(change)


def pad_with_zero(op: Operation, value: str, tensor: Tensor, pads: Sequence[int]) -> str:
    """Pad with what stands for zero: the zero point, if `value` holds a quantised tensor's numbers."""
    if not any(pads):
        return value
    dtype = op.graph.dtype_of(value)
    zero = 0
    if tensor.quantisation is not None and dtype == np.dtype(tensor.dtype):
        zero = int(tensor.quantisation.zero_points[0])
    return pad_with(op, value, pads, op.graph.constant(zero, str(dtype)))


def pad_with(op: Operation, value: str, pads: Sequence[int], filling: str) -> str:
    """Pad; ONNX Runtime's kernel lacks 16-bit numbers and booleans."""
    dtype = str(op.graph.dtype_of(value))
    if dtype in ("int16", "uint16", "bool"):
        wide = op.graph.node(
            "Pad", op.cast(value, "int32"), op.graph.constant(list(pads)), op.cast(filling, "int32")
        )
        return op.cast(wide, dtype)
    return op.graph.node("Pad", value, op.graph.constant(list(pads)), filling)


def reverse_v2(op: Operation) -> None:
    """REVERSE_V2 along axes."""
    shape = op.shape(0)
    axes = [op.axis(axis, len(shape)) for axis in op.integers(1, "axes")]

    def change(x: str, _: Layout) -> str:
        count = len(axes)
        return op.graph.node(
            "Slice",
            x,
            op.graph.constant([-1] * count),
            op.graph.constant([-(2**31)] * count),
            op.graph.constant(axes),
            op.graph.constant([-1] * count),
        )

    op.move(change)


def reverse_sequence(op: Operation) -> None:
    """REVERSE_SEQUENCE: each slice of the batch up to its own length."""
    options = op.options("ReverseSequenceOptions")
    rank = op.scope.rank(op.input(0))
    time, batch = op.axis(options.SeqDim(), rank), op.axis(options.BatchDim(), rank)
    if time == batch:
        raise RefusalError("expected different axes of the sequence and of the batch")
    order = [time, batch, *(axis for axis in range(rank) if axis not in (time, batch))]
    back = [order.index(axis) for axis in range(rank)]
    lengths = op.cast(op.value(1), "int64")

    def change(x: str, _: Layout) -> str:
        x = op.graph.node("Transpose", x, perm=order)
        x = op.graph.node("ReverseSequence", x, lengths, time_axis=0, batch_axis=1)
        return op.graph.node("Transpose", x, perm=back)

    op.move(change)


def dilate(op: Operation) -> None:
    """DILATE: copies of a value between the elements."""
    shape = list(op.shape(0))
    steps = op.integers(1, "dilations")
    if len(steps) != len(shape) or min(steps, default=1) < 1 or not shape:
        raise RefusalError(f"expected a dilation for each axis of {shape}, got {steps}")
    op.put(dilated(op, op.value(0), steps, op.reshape(op.value(2), ())))


def dilated(op: Operation, x: str, steps: Sequence[int], filling: str) -> str:
    """Put `step - 1` copies of a number between the elements along each axis."""
    shape = op.graph.shape_of(x)
    split = [d for dim in shape for d in (dim, 1)]
    ends = [p for step in steps for p in (0, step - 1)]
    x = pad_with(op, op.reshape(x, split), [0] * len(split) + ends, filling)
    x = op.reshape(x, [dim * step for dim, step in zip(shape, steps, strict=True)])
    sizes = [max((dim - 1) * step + 1, 0) for dim, step in zip(shape, steps, strict=True)]
    starts = op.graph.constant([0] * len(shape))
    return op.graph.node("Slice", x, starts, op.graph.constant(sizes))
