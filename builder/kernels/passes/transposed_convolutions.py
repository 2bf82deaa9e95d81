"""Transposed convolutions as ordinary ones.

A transposed convolution of stride s becomes s*s convolutions of the input (s*s*s in three dimensions), one
for each position inside a stride, whose results are interleaved: no product with an inserted zero is computed
(Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016).

All positions are one convolution with more output channels, whose windows are as large as the largest of
them, and which also computes what is then cut off. Where that is too much, on small images and if the stride
does not divide the kernel, each position is a convolution of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.filters import every, interleaved
from builder.kernels.passes.images import IMAGE, SIGNAL, VIDEO, Images, from_frames, to_frames
from builder.kernels.passes.video_convolutions import Spatial, convolve_frames, weight_of
from builder.kernels.rewriter import shape_of

# Output channels that take as long as a single one, on the widest vectors.
_VECTOR: Final = 16
# One convolution may do so much more work than those of all positions: it reads the input once.
_MOST_WORK: Final = 1.15
# Each position is a kernel, which is compiled and started, and reads the input once more.
_MOST_POSITIONS: Final = 25


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A transposed convolution in two or three dimensions, without its output padding.

    `padding`: what is cut off before each dimension: rows above, columns to the left.
    """

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    groups: int
    outputs: tuple[int, ...]

    @classmethod
    def of(cls, call: Call) -> _Transposed:
        """Return the geometry of a Relax call whose layouts are those of ONNX."""
        attrs, outputs = call.attrs, tuple(shape_of(call)[2:])
        strides, dilation = (tuple(int(v) for v in values) for values in (attrs.strides, attrs.dilation))
        padding = tuple(int(p) for p in list(attrs.padding)[: len(outputs)])
        return cls(strides, dilation, padding, int(attrs.groups), outputs)


def transposed(table: Images, call: Call) -> relax.Expr | None:
    """Return a transposed convolution of images, or in three dimensions, as `_by_phases` does.

    None unless its layouts are ONNX's and its weights constant float32.
    """
    images = len(shape_of(call)) == IMAGE
    weight = weight_of(call, *(("NCHW", "IOHW") if images else ("NCDHW", "IODHW")))
    if weight is None:
        return None
    return _by_phases(table, table.plain(call.args[0]), weight, _Transposed.of(call))


def transposed_1d(table: Images, call: Call) -> relax.Expr | None:
    """Return a transposed convolution in one dimension as one of images; None as in `transposed`."""
    weight = weight_of(call, "NCW", "IOW")
    if weight is None:
        return None
    op = _Transposed.of(call)
    flat = _Transposed((1, *op.strides), (1, *op.dilation), (0, *op.padding), op.groups, (1, *op.outputs))
    return _by_phases(table, table.as_image(call.args[0], SIGNAL), np.expand_dims(weight, 2), flat)


def _by_phases(table: Images, x: relax.Expr, weight: np.ndarray, op: _Transposed) -> relax.Expr:
    """Return a transposed convolution of `x` as a convolution whose results are interleaved.

    `x`: the input, `[N, I, H, W]` or `[N, I, D, H, W]`.
    `weight`: `[I, O / groups, KH, KW]` or `[I, O / groups, KD, KH, KW]`, float32.
    """
    apart = _apart(table, x, weight, op)
    if apart is not None:
        return apart
    bb = table.bb
    n, _, *extents = shape_of(x)
    kernel = _phases(_spread(weight, op.dilation), op.strides, op.groups)
    count, rank = prod(op.strides), len(extents)
    outputs, taps = kernel.shape[0] // count, kernel.shape[2:]
    cut, ends = op.padding, [p + e for p, e in zip(op.padding, op.outputs, strict=True)]
    full = [e + m - 1 for e, m in zip(extents, taps, strict=True)]
    before = [m - 1 for m in taps]
    if count == 1:
        inside = [b - p for b, p in zip(before, cut, strict=True)]
        after = [end - e for end, e in zip(ends, extents, strict=True)]
        if min(*inside, *after) >= 0:
            return bb.emit(_convolution(table, x, kernel, (*inside, *after), op.groups))
    # Positions after the last product, which an output padding may require.
    more = [max(0, -(-end // s) - f) for end, s, f in zip(ends, op.strides, full, strict=True)]
    after = [b + m for b, m in zip(before, more, strict=True)]
    y = bb.emit(_convolution(table, x, kernel, (*before, *after), op.groups))
    sizes = [f + m for f, m in zip(full, more, strict=True)]
    whole = [size * s for size, s in zip(sizes, op.strides, strict=True)]
    if count > 1:
        first = 1 if op.groups == 1 else 2  # of the axes of phases
        channels = (*op.strides, outputs) if op.groups == 1 else (outputs, *op.strides)
        y = bb.emit(relax.op.reshape(y, (n, *channels, *sizes)))
        positions = [axis for a in range(rank) for axis in (2 + rank + a, first + a)]
        y = bb.emit(relax.op.permute_dims(y, [0, 1 + rank if op.groups == 1 else 1, *positions]))
        y = bb.emit(relax.op.reshape(y, (n, outputs, *whole)))
    if tuple(whole) == op.outputs:
        return y
    return bb.emit(relax.op.strided_slice(y, list(range(2, 2 + rank)), list(cut), ends))


@dataclass(frozen=True, slots=True)
class _Position:
    """The convolution of one position inside a stride, along one dimension.

    `first`: the element of the kernel that is its last tap.
    `taps`: its window; the elements of the kernel are a stride apart.
    `before`, `after`: its padding.
    """

    first: int
    taps: int
    before: int
    after: int


def _apart(table: Images, x: relax.Expr, weight: np.ndarray, op: _Transposed) -> relax.Expr | None:
    """Return a transposed convolution of images as one convolution for each position inside a stride.

    None unless that is less work, and all positions have as many outputs.
    """
    n, _, *extents = shape_of(x)
    kernel, strides = _spread(weight, op.dilation), op.strides
    count, outputs = prod(strides), weight.shape[1]
    if op.groups > 1 or not 1 < count <= _MOST_POSITIONS or len(extents) != IMAGE - 2:
        return None
    if any(outs % s for outs, s in zip(op.outputs, strides, strict=True)):
        return None
    sizes = [outs // s for outs, s in zip(op.outputs, strides, strict=True)]
    dimensions = list(zip(kernel.shape[2:], strides, op.padding, extents, sizes, strict=True))
    axes = [[_position(p, *dimension) for p in range(dimension[1])] for dimension in dimensions]
    if any(min(at.taps, 1 + at.before, 1 + at.after) < 1 for axis in axes for at in axis):
        return None
    work = -(-outputs // _VECTOR) * prod(sum(at.taps for at in axis) for axis in axes) * prod(sizes)
    taps = [-(-k // s) for k, s, *_ in dimensions]
    whole = [extent + m - 1 for extent, m in zip(extents, taps, strict=True)]
    if -(-outputs * count // _VECTOR) * prod(taps) * prod(whole) <= _MOST_WORK * work:
        return None
    bb, parts = table.bb, []
    for places in product(*axes):
        chosen = tuple(
            slice(at.first, at.first + (at.taps - 1) * s + 1, s)
            for at, s in zip(places, strides, strict=True)
        )
        part = np.flip(kernel[(slice(None), slice(None), *chosen)], (2, 3)).swapaxes(0, 1)
        padding = (*(at.before for at in places), *(at.after for at in places))
        parts.append(bb.emit(relax.op.nn.conv2d(x, relax.const(np.ascontiguousarray(part)), padding=padding)))
    y = bb.emit(relax.op.reshape(bb.emit(relax.op.concat(parts, 1)), (n, *strides, outputs, *sizes)))
    y = bb.emit(relax.op.permute_dims(y, [0, 3, 4, 1, 5, 2]))
    return bb.emit(relax.op.reshape(y, (n, outputs, *op.outputs)))


def _position(place: int, kernel: int, stride: int, cut: int, extent: int, size: int) -> _Position:
    """Return the convolution that computes every `stride`th output from `place` on, along one dimension.

    `place`: the first output, less than `stride`.
    `extent`, `size`: the input's extent, and how many outputs there are.
    """
    skipped, first = divmod(place + cut, stride)
    taps = len(range(first, kernel, stride))
    before = taps - 1 - skipped
    return _Position(first, taps, before, size + taps - 1 - extent - before)


def _spread(weight: np.ndarray, dilation: tuple[int, ...]) -> np.ndarray:
    """Return `[I, O, ...]` with the zeros of its dilation written out."""
    if set(dilation) == {1}:
        return weight
    extents = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation, strict=True)]
    whole = np.zeros((*weight.shape[:2], *extents), weight.dtype)
    whole[(slice(None), slice(None), *(slice(None, None, d) for d in dilation))] = weight
    return whole


def _phases(weight: np.ndarray, strides: tuple[int, ...], groups: int) -> np.ndarray:
    """Return a kernel for each position inside a stride, as the kernel of one convolution.

    `weight`: `[I, O / groups, k, ...]`.
    `strides`: `s` of each dimension.
    Result: `[O * prod(s), I / groups, ceil(k / s), ...]`, reversed along each dimension. With groups, the
        positions of an output channel are adjacent; else the channels of a position, which stay packed.
    """
    inputs, outputs, *kernel = weight.shape
    taps = [-(-k // s) for k, s in zip(kernel, strides, strict=True)]
    pairs = list(zip(taps, strides, strict=True))
    whole = np.zeros((inputs, outputs, *(m * s for m, s in pairs)), weight.dtype)
    whole[(slice(None), slice(None), *(slice(k) for k in kernel))] = weight
    split = whole.reshape(groups, inputs // groups, outputs, *(extent for pair in pairs for extent in pair))
    split = np.flip(split, tuple(3 + 2 * a for a in range(len(pairs))))
    positions, steps = ([3 + 2 * a + part for a in range(len(pairs))] for part in (1, 0))
    split = split.transpose(*((0, 2, *positions) if groups > 1 else (0, *positions, 2)), 1, *steps)
    return np.ascontiguousarray(split.reshape(-1, inputs // groups, *taps))


def _convolution(
    table: Images, x: relax.Expr, weight: np.ndarray, padding: tuple[int, ...], groups: int
) -> relax.Expr:
    """Return a convolution of stride 1 whose weights are `[O, I / groups, ...]`.

    `padding` is what is added before each dimension, then what is added after each.
    """
    if len(shape_of(x)) == VIDEO:
        n = shape_of(x)[0]
        images = table.bb.emit(to_frames(table.bb, x))
        y = convolve_frames(table, images, weight, Spatial((1, 1, 1), (1, 1, 1), padding, groups), n)
        return from_frames(table.bb, y, n)
    filters = weight.shape[0] // groups if groups == shape_of(x)[1] else 1
    if groups > 1 and filters > 1:
        parts = [
            relax.op.nn.conv2d(x, relax.const(every(weight, k, filters)), padding=padding, groups=groups)
            for k in range(filters)
        ]
        return interleaved(table, parts)
    return relax.op.nn.conv2d(x, relax.const(weight), padding=padding, groups=groups)
