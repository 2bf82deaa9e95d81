"""Operators that place, select or count elements at places known when the model is imported."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from builder.errors import ModelError
from builder.importer.rewrites.replacement import Nodes, Replacement
from builder.importer.rewrites.windows import Windows

# The extents of a window of a pooling with indices, added up; each place is a slice and a comparison.
MAX_WINDOW: Final = 512
# Rows of a determinant: each is a step of twenty nodes. An expansion of more than four has more terms.
MAX_ELIMINATED: Final = 32
_MAX_EXPANDED: Final = 4


def tensor_scatter(new: Replacement) -> Nodes | None:
    """TensorScatter of a cache, an update and the first place of each row: ScatterElements along an axis."""
    options = new.attributes
    shape, added = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    axis = int(options.get("axis", -2)) % len(shape)
    form = [1] * len(shape)
    form[axis] = added[axis]
    places = new.constant(np.arange(added[axis]).reshape(form), np.int64)
    if first := new.input(2):
        rows = new.op("Reshape", first, new.ints(shape[0], *[1] * (len(shape) - 1)))
        places = new.op("Add", places, rows)
        if options.get("mode", "linear") == "circular":
            places = new.op("Mod", places, new.constant(shape[axis], np.int64))
    places = new.op("Expand", places, new.ints(*added))
    return new.result("ScatterElements", new.inputs[0], places, new.inputs[1], axis=axis)


def compress(new: Replacement) -> Nodes | None:
    """Compress by a constant condition: Gather."""
    condition = new.graph.constant(new.inputs[1])
    axis = new.attributes.get("axis")
    if condition is None or not condition.any():
        return None
    x = new.inputs[0] if axis is not None else new.op("Reshape", new.inputs[0], new.ints(-1))
    return new.result("Gather", x, new.ints(*np.flatnonzero(condition).tolist()), axis=int(axis or 0))


def cumulative_sum(new: Replacement) -> Nodes | None:
    """CumSum of a scalar, which PyTorch's exporter writes with axis 0: the scalar itself."""
    return _of_scalar(new, 0) if new.graph.shape_of(new.inputs[0]) == () else None


def _of_scalar(new: Replacement, nothing: int) -> Nodes | None:
    found = new.type_of(new.inputs[0])
    exclusive = new.attributes.get("exclusive", 0)
    return new.result("Identity", new.constant(nothing, found.dtype) if exclusive else new.inputs[0])


def cumulative_product(new: Replacement) -> Nodes | None:
    """CumProd along a constant axis: products with copies that are shifted by 1, 2, 4 ... places."""
    options = new.attributes
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    place = new.graph.constant(new.inputs[1])
    if place is None or place.size != 1:
        return None
    if not shape:
        return _of_scalar(new, 1)
    axis = int(place.reshape(())) % len(shape)
    reverse, extent = bool(options.get("reverse", 0)), shape[axis]

    def shift(x: str, count: int) -> str:
        ones = new.constant(np.ones([count if a == axis else d for a, d in enumerate(shape)]), found.dtype)
        bounds = (count, extent) if reverse else (0, extent - count)
        kept = new.op("Slice", x, *(new.ints(bound) for bound in bounds), new.ints(axis))
        return new.op("Concat", *((kept, ones) if reverse else (ones, kept)), axis=axis)

    x, step = new.inputs[0], 1
    if options.get("exclusive", 0):
        x = shift(x, 1) if extent > 1 else new.constant(np.ones(shape), found.dtype)
    while step < extent:
        x = new.op("Mul", x, shift(x, step))
        step *= 2
    return new.result("Identity", x)


def column_to_image(new: Replacement) -> Nodes | None:
    """Col2Im: a transposed convolution whose weights put each column into its place of the block."""
    options = new.attributes
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    image, block = new.graph.constant(new.inputs[1]), new.graph.constant(new.inputs[2])
    if image is None or block is None or not 1 <= image.size <= 3:
        return None
    rank, count = image.size, int(np.prod(block))
    strides = list(options.get("strides", [1] * rank))
    dilations = list(options.get("dilations", [1] * rank))
    pads = list(options.get("pads", [0] * (2 * rank)))
    spans = [d * (int(b) - 1) + 1 for d, b in zip(dilations, block, strict=True)]
    padded = [int(i) + pads[a] + pads[rank + a] for a, i in enumerate(image)]
    steps = [(p - s) // stride + 1 for p, s, stride in zip(padded, spans, strides, strict=True)]
    if int(np.prod(steps)) != shape[2] or shape[1] % count:
        return None
    channels = shape[1] // count
    rest = [p - s - stride * (n - 1) for p, s, stride, n in zip(padded, spans, strides, steps, strict=True)]
    weight = np.tile(np.eye(count).reshape(count, 1, *block), (channels, 1, *[1] * rank))
    # The rest is behind the last block: computed without padding, then cut.
    x = new.op("Reshape", new.inputs[0], new.ints(shape[0], shape[1], *steps))
    y = new.op(
        "ConvTranspose",
        x,
        new.constant(weight, found.dtype),
        group=channels,
        strides=strides,
        dilations=dilations,
        kernel_shape=[int(b) for b in block],
    )
    if any(rest):
        ends = new.ints(*[0] * (rank + 2), 0, 0, *rest)
        y = new.op("Pad", y, ends)
    if any(pads):
        begins = pads[:rank]
        ends = new.ints(*(b + int(i) for b, i in zip(begins, image, strict=True)))
        y = new.op("Slice", y, new.ints(*begins), ends, new.ints(*range(2, rank + 2)))
    return new.result("Identity", y)


def max_pool_with_indices(new: Replacement) -> Nodes | None:
    """MaxPool that also returns where each maximum was: one axis after the other, from the last.

    Of equal numbers the first counts, in the order of rows: the first of its row, in the first row.
    """
    where = new.output(1)
    options = new.attributes
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    if not where or found.dtype.kind not in "fiu":
        return None
    kernel = [int(k) for k in options["kernel_shape"]]
    rank = len(kernel)
    strides, dilations = (list(options.get(key, [1] * rank)) for key in ("strides", "dilations"))
    if sum(kernel) > MAX_WINDOW:
        raise ModelError(
            f"MaxPool ({new.node.name}): expected a window with indices of at most {MAX_WINDOW} places along "
            f"its axes, got {sum(kernel)}",
            hint="export it without indices, or take a largest number and its place: x.flatten(-2).max(-1)",
        )
    windows = Windows.of(options, shape[2:], kernel)
    begins, ends = windows.begins, windows.reach
    best = new.inputs[0]
    is_padded = any(begins) or any(ends)
    if is_padded:
        lowest = -np.inf if found.dtype.kind == "f" else np.iinfo(found.dtype).min
        widths = new.ints(0, 0, *begins, 0, 0, *ends)
        best = new.op("Pad", best, widths, new.constant(lowest, found.dtype))
    index = new.constant(_flat(shape, begins, ends, bool(options.get("storage_order", 0))), np.int64)
    for axis in reversed(range(rank)):
        values, places = (
            _along(new, tensor, axis, windows.counts[axis], kernel[axis], strides[axis], dilations[axis])
            for tensor in (best, index)
        )
        best, index = values[0], places[0]
        for value, place in zip(values[1:], places[1:], strict=True):
            larger = new.op("Greater", value, best)
            if is_padded:  # a number that is no larger than the padding counts, too
                larger = new.op("Or", larger, new.op("Less", index, new.constant(0, np.int64)))
            best = new.op("Where", larger, value, best)
            index = new.op("Where", larger, place, index)
    if new.outputs[0]:
        new.op("Identity", best, to=new.outputs[0])
    planes = np.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], *[1] * rank)
    new.op("Add", index, new.constant(planes * int(np.prod(shape[2:])), np.int64), to=where)
    return new.nodes


def _along(
    new: Replacement, x: str, axis: int, count: int, kernel: int, stride: int, dilation: int
) -> list[str]:
    """The elements of all windows along a spatial axis, one tensor for each place of the window."""
    ends = [place * dilation + stride * (count - 1) + 1 for place in range(kernel)]
    return [
        new.op("Slice", x, *map(new.ints, (place * dilation, end, axis + 2, stride)))
        for place, end in enumerate(ends)
    ]


def _flat(
    shape: Sequence[int], begins: Sequence[int], ends: Sequence[int], columns_first: bool
) -> NDArray[np.int64]:
    """The flat index into a plane of each place of the padded input, `[1, 1, *padded]`; -1 in the padding."""
    rank = len(begins)
    index = np.zeros([1] * rank, np.int64)
    is_inside = np.ones([1] * rank, np.bool_)
    for axis in reversed(range(rank)) if columns_first else range(rank):
        places = np.arange(begins[axis] + shape[2 + axis] + ends[axis]) - begins[axis]
        form = [1] * rank
        form[axis] = -1
        index = index * shape[2 + axis] + places.reshape(form)
        is_inside = is_inside & ((places >= 0) & (places < shape[2 + axis])).reshape(form)
    return np.where(is_inside, index, -1)[None, None]


def max_unpool(new: Replacement) -> Nodes | None:
    """MaxUnpool with a constant output shape: ScatterElements into zeros.

    The indices count in the shape that follows from the attributes; the rest of the output is padding.
    """
    name = new.input(2)
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    wanted = new.graph.constant(name) if name else None
    if wanted is None:
        return None
    options = new.attributes
    kernel = list(options["kernel_shape"])
    rank = len(kernel)
    strides, pads = list(options.get("strides", [1] * rank)), list(options.get("pads", [0] * (2 * rank)))
    before = [(shape[2 + a] - 1) * strides[a] - pads[a] - pads[rank + a] + kernel[a] for a in range(rank)]
    rest = [int(w) - b for w, b in zip(wanted[2:], before, strict=True)]
    if min(rest) < 0:
        return None
    extents = [*shape[:2], *before]
    zeros = new.constant(np.zeros(int(np.prod(extents))), found.dtype)
    flat = [new.op("Reshape", each, new.ints(-1)) for each in new.inputs[:2]]
    placed = new.op("ScatterElements", zeros, flat[1], flat[0], axis=0)
    image = new.op("Reshape", placed, new.ints(*extents))
    return new.result("Pad", image, new.ints(*[0] * (rank + 4), *rest))


def tf_idf(new: Replacement) -> Nodes | None:
    """TfIdfVectorizer of integers: compare each window with each n-gram of the pool, and count."""
    options = new.attributes
    shape = new.shape_of(new.inputs[0])
    pool = [int(each) for each in options.get("pool_int64s", [])]
    if not 1 <= len(shape) <= 2 or not pool:
        return None
    length = shape[-1]
    starts, places = [*options["ngram_counts"], len(pool)], np.array(options["ngram_indexes"])
    weights = np.array(options.get("weights") or [1.0] * len(places), np.float32)
    mode = str(options["mode"])
    width = int(places.max()) + 1
    rows = new.op("Reshape", new.cast(new.inputs[0], TensorProto.INT64), new.ints(-1, length))
    count, done = "", 0
    for size in range(1, len(starts)):
        grams = np.array(pool[starts[size - 1] : starts[size]]).reshape(-1, size)
        first, done = done, done + len(grams)
        if not options["min_gram_length"] <= size <= options["max_gram_length"]:
            continue
        windows = _windows(length, size, int(options["max_skip_count"]))
        if not len(grams) or not len(windows):
            continue
        seen = new.op("Gather", rows, new.constant(windows[:, None, :], np.int64), axis=1)
        same = new.cast(new.op("Equal", seen, new.constant(grams[None, None], np.int64)), TensorProto.FLOAT)
        whole = new.reduce("ReduceMin", same, [3], keep=False)
        found = new.reduce("ReduceSum", whole, [1], keep=False)
        spread = np.zeros((len(grams), width), np.float32)
        spread[np.arange(len(grams)), places[first:done]] = 1
        part = new.op("MatMul", found, new.constant(spread, np.float32))
        count = new.op("Add", count, part) if count else part
    if not count:
        return None
    scale = np.zeros(width, np.float32)
    scale[places] = weights
    if mode == "IDF":
        count = new.op("Min", count, new.constant(1, np.float32))
    if mode != "TF":
        count = new.op("Mul", count, new.constant(scale, np.float32))
    return new.result("Reshape", count, new.ints(*shape[:-1], width))


def _windows(length: int, size: int, skips: int) -> NDArray[Any]:
    """The places of each window of `size` elements, [windows, size]."""
    found = [
        np.arange(start, start + (size - 1) * (skip + 1) + 1, skip + 1)
        for skip in range(skips + 1 if size > 1 else 1)
        for start in range(length - (size - 1) * (skip + 1))
    ]
    return np.array(found).reshape(-1, size)


def determinant(new: Replacement) -> Nodes | None:
    """Det of a known size: up to 4 x 4 the expansion by the first row, then elimination."""
    found, shape = new.type_of(new.inputs[0]), new.shape_of(new.inputs[0])
    if not 1 <= shape[-1] <= MAX_ELIMINATED:
        return None
    size = shape[-1]
    if size > _MAX_EXPANDED:
        return new.result("Identity", _eliminated(new, new.inputs[0], size, found.dtype))

    @cache
    def entry(row: int, column: int) -> str:
        line = new.op("Gather", new.inputs[0], new.constant(row, np.int64), axis=-2)
        return new.op("Gather", line, new.constant(column, np.int64), axis=-1)

    @cache
    def minor(row: int, columns: tuple[int, ...]) -> str:
        if len(columns) == 1:
            return entry(row, columns[0])
        total = ""
        for position, column in enumerate(columns):
            rest = minor(row + 1, tuple(other for other in columns if other != column))
            term = new.op("Mul", entry(row, column), rest)
            total = term if not total else new.op("Sub" if position % 2 else "Add", total, term)
        return total

    return new.result("Identity", minor(0, tuple(range(size))))


def _eliminated(new: Replacement, x: str, size: int, dtype: np.dtype[Any]) -> str:
    """The determinant of matrices [..., size, size]: the product of pivots, the largest of each column."""
    zero, one = new.constant(0, dtype), new.constant(1, dtype)
    end, last, row_axis = new.ints(size), new.ints(-1), new.ints(-2)

    def rest(y: str, axis: str) -> str:
        return new.op("Slice", y, new.ints(1), end, axis)

    def first(y: str, axis: str) -> str:
        return new.op("Slice", y, new.ints(0), new.ints(1), axis)

    result = ""
    for count in range(size, 1, -1):
        place = new.op("ArgMax", new.op("Abs", first(x, last)), axis=-2, keepdims=1)
        here = new.op("Equal", new.constant(np.arange(count)[:, None], np.int64), place)
        row = new.reduce("ReduceSum", new.op("Where", here, x, zero), [-2], keep=True)
        # The first row goes where the pivot's row was: an exchange, which changes the sign.
        below = new.op("Where", rest(here, row_axis), first(x, row_axis), rest(x, row_axis))
        pivot = first(row, last)
        is_first = new.op("Equal", place, new.constant(0, np.int64))
        factor = new.op("Where", is_first, pivot, new.op("Neg", pivot))
        result = new.op("Mul", result, factor) if result else factor
        # Where the largest is 0, all are.
        divisor = new.op("Where", new.op("Equal", pivot, zero), one, pivot)
        shares = new.op("Div", first(below, last), divisor)
        x = new.op("Sub", rest(below, last), new.op("Mul", shares, rest(row, last)))
    return new.op("Squeeze", new.op("Mul", result, x), new.ints(-2, -1))


def deformable_convolution(new: Replacement) -> Nodes | None:
    """DeformConv in two dimensions: GridSample at each place of the kernel, then a matrix product."""
    options = new.attributes
    found = new.type_of(new.inputs[0])
    shape, kernel, moved = (new.graph.shape_of(new.inputs[index]) for index in range(3))
    if shape is None or kernel is None or moved is None or len(shape) != 4:
        return None
    batch, channels, height, width = shape
    outputs, per_group, *window = kernel
    rows, columns = moved[2:]
    count = window[0] * window[1]
    strides, dilations = (list(options.get(key, [1, 1])) for key in ("strides", "dilations"))
    pads = list(options.get("pads", [0, 0, 0, 0]))
    shifts = int(options.get("offset_group", 1))
    groups = int(options.get("group", 1))
    y0 = np.arange(rows) * strides[0] - pads[0]
    x0 = np.arange(columns) * strides[1] - pads[1]
    dy, dx = (np.arange(k) * d for k, d in zip(window, dilations, strict=True))
    base_y = (dy[:, None, None, None] + y0[None, None, :, None]) + np.zeros((1, window[1], 1, columns))
    base_x = (dx[None, :, None, None] + x0[None, None, None, :]) + np.zeros((window[0], 1, rows, 1))
    # Each place of the kernel has an offset in y and one in x.
    offsets = new.op("Reshape", new.inputs[2], new.ints(batch * shifts, count, 2, rows, columns))
    grid = []
    for index, base, size in ((1, base_x, width), (0, base_y, height)):
        offset = new.op("Gather", offsets, new.constant(index, np.int64), axis=2)
        place = new.op("Add", offset, new.constant(base.reshape(1, count, rows, columns), found.dtype))
        # To GridSample's coordinates, in which -1 and 1 are the outer edges of the picture.
        scaled = new.op("Mul", place, new.constant(2 / size, found.dtype))
        scaled = new.op("Add", scaled, new.constant(1 / size - 1, found.dtype))
        grid.append(new.op("Reshape", scaled, new.ints(batch * shifts, count * rows, columns, 1)))
    picture = new.op("Reshape", new.inputs[0], new.ints(batch * shifts, channels // shifts, height, width))
    both = new.op("Concat", *grid, axis=-1)
    mode = "linear" if new.graph.opset >= 20 else "bilinear"
    sampled = new.op("GridSample", picture, both, mode=mode, padding_mode="zeros", align_corners=0)
    sampled = new.op("Reshape", sampled, new.ints(batch, shifts, channels // shifts, count, rows * columns))
    if mask := new.input(4):
        gate = new.op("Reshape", mask, new.ints(batch, shifts, 1, count, rows * columns))
        sampled = new.op("Mul", sampled, gate)
    sampled = new.op("Reshape", sampled, new.ints(batch, groups, per_group * count, rows * columns))
    weight = new.op("Reshape", new.inputs[1], new.ints(1, groups, outputs // groups, per_group * count))
    y = new.op("Reshape", new.op("MatMul", weight, sampled), new.ints(batch, outputs, rows, columns))
    if bias := new.input(3):
        y = new.op("Add", y, new.op("Reshape", bias, new.ints(1, -1, 1, 1)))
    return new.result("Identity", y)
