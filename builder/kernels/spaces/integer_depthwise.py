"""Depthwise convolution of bytes on packed channels, with int32 sums.

The input and the output are `[N, C/b, H, W, b]`; a channel's lane has its own filter. Several taps are added
to a sum at once, in one of three ways:

- Four columns of a row, by an instruction that adds the products of four adjacent bytes
  (`builder.target.dot`), on x86. The bytes of four adjacent pixels are adjacent too, so that one instruction
  loads and one interleaves them. Adjacent outputs share four columns if all their windows fit into them: two
  outputs of a 3x3 window at stride 1 (`Quads`). Columns that a window does not have are multiplied by zeros.
- Four rows of a column, by the same instruction, on ARM, and on x86 where the window has one or two columns,
  or its columns are apart. The bytes of four rows are interleaved in registers, once for all columns of
  outputs that read them. Rows that the window does not have are multiplied by zeros.
- Two columns of a row: their products are added in 16 bits, and the sum is added in 32. That is exact unless
  both weights are -128 (`taps_at_once`).

Without either, float32 is as fast: `depthwise` converts the bytes, and its sums are exact too.

As in `integer_convolution`, padding is the zero point, and what it adds to the sums is left to the caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import constant_of, shape_of
from builder.kernels.spaces.depthwise import Pictures
from builder.kernels.spaces.dot_loops import mark_lanes
from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of
from builder.kernels.spaces.padded_copy import pad
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "integer_depthwise"

_ROWS: Final = 4  # rows, or columns, that are interleaved
_PAIR: Final = 2  # columns whose products are added in 16 bits
# With fewer rows, or columns, most products would have a zero as a factor.
_FEWEST_ROWS: Final = 3
# Vectors of sums that are held while the rows of a window are read, where a row of outputs has more than fit
# the registers. LLVM loads the columns of all rows of the window first, and spills those of 16 vectors.
_HELD: Final = 8
# Counted on a Cortex-A72, over float32: pairs of 3x3 take 0.58 of the instructions, 5x5 0.71, 7x7 1.01.
_MOST_TAPS: Final = 25
# The largest sum of two weights' magnitudes: times 128, it fits into 16 bits.
_LARGEST_PAIR: Final = 255
# Vectors of sums whose bytes are interleaved together. Counted on a Cortex-A76, over twice as many: windows
# of 3x3 take 0.90 of the instructions at stride 1, 0.81 at stride 2.
_INTERLEAVED: Final = 16
# Groups of four columns whose products are unrolled. A longer window keeps its loops.
_MOST_GROUPS: Final = 16
# Where few rows fit the L1 cache: the fewest rows of a round, and the fewest for each row that the next round
# copies once more.
_LEAST_ROUND: Final = 2
_LEAST_OVER_AGAIN: Final = 4
# Columns of the input that are copied together.
_COPIED: Final = 8


@dataclass(frozen=True, slots=True)
class Quads:
    """How windows read four adjacent columns at a time.

    `count`: groups of four columns that a window reads.
    `outputs`: adjacent outputs that read the same groups.
    `stride`: columns from the groups of such outputs to those of the next ones.
    """

    count: int
    outputs: int
    stride: int

    @classmethod
    def of(cls, op: Conv2d, target: DeviceTarget) -> Quads | None:
        """Return the groups for the windows of `op`, None if columns are not read four at a time."""
        if not _interleaves_columns(op.kernel[1], op.dilation[1], target):
            return None
        count = -(-op.kernel[1] // _ROWS)
        outputs = (_ROWS * count - op.kernel[1]) // op.strides[1] + 1
        return cls(count, outputs, outputs * op.strides[1])

    def reach(self, columns: int) -> int:
        """Return how many columns of the input `columns` adjacent columns of the output read."""
        return (columns - 1) // self.outputs * self.stride + _ROWS * self.count


def _interleaves_columns(kernel_w: int, dilation: int, target: DeviceTarget) -> bool:
    """Whether an instruction of `target` adds four columns, and the window has enough, without gaps."""
    return target.arch == "x86_64" and kernel_w >= _FEWEST_ROWS and dilation == 1


def taps_at_once(weight: np.ndarray, target: DeviceTarget, dilation: int = 1) -> int:
    """Return how many taps are added to a sum at once: 4 columns or rows, or 2 columns; 0 for float32.

    `weight`: `[C, 1, KH, KW]`, int8.
    `dilation`: along rows: from a column of the window to the next.
    """
    dot = target.dot
    _, _, kernel_h, kernel_w = weight.shape
    enough = kernel_h >= _FEWEST_ROWS or _interleaves_columns(kernel_w, dilation, target)
    if dot.group == _ROWS and dot.name and not dot.halves and enough:
        return _ROWS
    few = weight[0].size <= _MOST_TAPS
    return _PAIR if dot.data == "int8" and few and _fits_pairs(weight) else 0


def _fits_pairs(weight: np.ndarray) -> bool:
    """Whether the products of each pair with any int8, added, fit 16 bits."""
    along = np.abs(weight.astype(np.int64))
    along = along if along.shape[3] > 1 else along.swapaxes(2, 3)
    size = along.shape[3] // _PAIR * _PAIR
    pairs = along[..., :size].reshape(*along.shape[:3], -1, _PAIR).sum(-1)
    return not pairs.size or int(pairs.max()) <= _LARGEST_PAIR


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a depthwise convolution of bytes as `target.dot` takes them; the output has the input's blocks."""
    op, target, weight, b = layer.op, layer.target, layer.numbers, layer.in_block
    at_once = taps_at_once(weight, target, op.dilation[1])
    if not at_once:
        return None
    blocks = shape_of(layer.x)[1]
    kernel_h, kernel_w = op.kernel
    rows = at_once == _ROWS
    quads = Quads.of(op, target) if rows else None
    if quads is not None:
        return _emit_quads(layer, quads)
    full = np.zeros((blocks * b, -(-kernel_h // _ROWS) * _ROWS if rows else kernel_h, kernel_w), np.int8)
    full[: op.in_channels, :kernel_h] = weight[:, 0]
    packed = full.reshape(blocks, b, *full.shape[1:]).transpose(0, 2, 3, 1)
    if rows:
        packed = packed.reshape(blocks, -1, _ROWS, kernel_w, b).transpose(0, 1, 3, 4, 2)
        below = max(0, _rows_read(op, full.shape[1]) - op.in_height - op.padding[0] - op.padding[2])
        top, left, bottom, right = op.padding
        around = replace(op, padding=(top, left, bottom + below, right))
    else:
        around = op
    taps = _four_rows if rows else _two_columns
    return _emit_padded(layer, around, packed, lambda data, w: taps(data, w, op))


def _emit_quads(layer: Layer, quads: Quads) -> relax.Expr:
    """Emit the convolution with groups of four columns; the last group may need more padding."""
    op, b = layer.op, layer.in_block
    blocks, (kernel_h, kernel_w) = shape_of(layer.x)[1], op.kernel
    full = np.zeros((blocks * b, kernel_h, quads.outputs, quads.count * _ROWS), np.int8)
    for output in range(quads.outputs):
        first = output * op.strides[1]
        full[: op.in_channels, :, output, first : first + kernel_w] = layer.numbers[:, 0]
    packed = full.reshape(blocks, b, kernel_h, quads.outputs, quads.count, _ROWS).transpose(0, 2, 4, 3, 1, 5)
    top, left, bottom, right = op.padding
    right = max(right, quads.reach(op.out_width) - op.in_width - left)
    around = replace(op, padding=(top, left, bottom, right))
    return _emit_padded(layer, around, packed, lambda data, w: _four_columns(data, w, op, quads))


def _emit_padded(
    layer: Layer, around: Conv2d, packed: np.ndarray, convolve: Callable[[te.Tensor, te.Tensor], te.Tensor]
) -> relax.Expr:
    """Emit `convolve` of the data, padded as `around` says with their zero point, and the packed weights."""

    def compute(data: te.Tensor, w: te.Tensor, value: tirx.Expr) -> te.Tensor:
        return convolve(pad(data, around, value), w)

    number = constant_of(layer.zero)
    written = None if number is None else int(number)
    return layer.emit_bytes("integer_depthwise", np.ascontiguousarray(packed), written, layer.data, compute)


def _rows_read(op: Conv2d, kernel_h: int) -> int:
    """Return the rows of the input that windows with `kernel_h` rows read."""
    return (op.out_height - 1) * op.strides[0] + (kernel_h - 1) * op.dilation[0] + 1


def _four_rows(x: te.Tensor, w: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return the convolution of padded `x`; the weights are `[C/b, KH/4, KW, b, 4]`."""
    blocks, groups, kernel_w, block, _ = (int(d) for d in w.shape)
    kq = te.reduce_axis((0, groups), "kq")
    kw = te.reduce_axis((0, kernel_w), "kw")
    row = te.reduce_axis((0, _ROWS), "row")
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def element(n: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = x[n, c, y * sh + (kq * _ROWS + row) * dh, z * sw + kw * dw, v].astype("int32")
        return te.sum(value * w[c, kq, kw, v, row].astype("int32"), axis=[kq, kw, row])

    return _anchor(op, blocks, block, element)


def _four_columns(x: te.Tensor, w: te.Tensor, op: Conv2d, quads: Quads) -> te.Tensor:
    """Return the convolution of padded `x`; the weights are `[C/b, KH, KW/4, S, b, 4]`.

    S outputs read the same columns, each with its own weights.
    """
    blocks, kernel_h, groups, outputs, block, _ = (int(d) for d in w.shape)
    kh = te.reduce_axis((0, kernel_h), "kh")
    kq = te.reduce_axis((0, groups), "kq")
    column = te.reduce_axis((0, _ROWS), "column")
    (sh, _), (dh, _) = op.strides, op.dilation

    def element(n: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        first, number = (z, 0) if outputs == 1 else (z // outputs, z % outputs)
        value = x[n, c, y * sh + kh * dh, first * quads.stride + kq * _ROWS + column, v].astype("int32")
        factor = w[c, kh, kq, number, v, column].astype("int32")
        return te.sum(value * factor, axis=[kh, kq, column])

    return _anchor(op, blocks, block, element)


def _two_columns(x: te.Tensor, w: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return the convolution of padded `x`; the weights are `[C/b, KH, KW, b]`.

    A window of one column has pairs of rows.
    """
    blocks, kernel_h, kernel_w, block = (int(d) for d in w.shape)
    tall = kernel_w == 1
    along, others = (kernel_h, kernel_w) if tall else (kernel_w, kernel_h)
    other = te.reduce_axis((0, others), "other")
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def element(n: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        def product(tap: int) -> tirx.Expr:
            kh, kw = (tap, other) if tall else (other, tap)
            value = x[n, c, y * sh + kh * dh, z * sw + kw * dw, v].astype("int16")
            return value * w[c, kh, kw, v].astype("int16")

        total = None
        for first in range(0, along, _PAIR):
            part = product(first)
            if first + 1 < along:
                part = part + product(first + 1)
            wide = part.astype("int32")
            total = wide if total is None else total + wide
        return te.sum(total, axis=[other])

    return _anchor(op, blocks, block, element)


def _anchor(op: Conv2d, blocks: int, block: int, element: object) -> te.Tensor:
    shape = (op.batch, blocks, op.out_height, op.out_width, block)
    return te.compute(shape, element, name="depthwise", attrs={SPACE_MARK: KIND})


@dataclass(frozen=True, slots=True)
class IntegerDepthwiseTiles:
    """The decisions of the design space.

    `ow`: output columns that are unrolled, so that they share what they read.
    `oh`: output rows computed together: the input that they read is padded into a buffer that stays in a
        cache.
    """

    ow: Decision
    oh: Decision


def space(
    pictures: Pictures, target: DeviceTarget, *, kernel_w: int = 0, outputs: int = 0, vectors: int = 1
) -> Space[IntegerDepthwiseTiles]:
    """Return the design space of a depthwise convolution of bytes.

    `kernel_w`: columns of the window if pairs of them are added at once: as many outputs are computed
        together as leave registers for what they read and for a row of weights. 0 if four rows are added at
        once: then the sums of a column are complete before those of the next one begin.
    `outputs`: outputs that read the same groups of four columns, 0 if columns are not read like that. The
        sums of all columns are held while the rows of the window are read. There are so few instructions that
        the padded input has to stay in the L1 cache.
    `vectors`: vectors of sums of a column. LLVM interleaves the bytes of all columns before it adds products,
        and spills them if they are too many.
    """
    width, row_bytes = pictures.width, pictures.row_bytes
    ows, ohs = tilings(width, 16), tilings(pictures.height, pictures.height)
    high = max(1, target.core.l2_bytes // 4 // row_bytes)
    together = _INTERLEAVED // max(2, vectors)
    most = max(1, (target.simd.registers - 2 - 2 * kernel_w) // 5) if kernel_w else together
    if outputs:
        # A tile has whole groups of outputs, so that the weights of each output are known.
        ows = tuple(w for w in ows if w % outputs == 0 or w == width) or (min(outputs, width),)
        fit = target.simd.registers // 2 // max(1, vectors)
        most = width if width <= fit else max(ows[0], min(_HELD // max(1, vectors), fit))
        cached = target.core.l1_bytes // 2 // row_bytes
        high = min(high, max(cached, _LEAST_ROUND, round(_LEAST_OVER_AGAIN * pictures.again)))
    ow, oh = max(w for w in ows if w <= most), pictures.rows_of_a_round(high)
    return Space(IntegerDepthwiseTiles(ow, oh), {"ow": ows, "oh": ohs})


def apply(sch: st.Schedule, block: SBlockRV, tiles: IntegerDepthwiseTiles) -> None:
    """Order the loops of a depthwise convolution of bytes, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    is_dot, by_columns = _reads_four(sch, block), _reads_four_columns(sch, block)
    n, c, y, z, v, *taps = sch.get_loops(block)
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    if is_dot:
        *taps, row = taps
        sch.reorder(n, c, yo, yi, zo, *((*taps, zi) if by_columns else (zi, *taps)), v, row)
    else:
        sch.reorder(n, c, yo, yi, zo, *taps, zi, v)
    outer = sch.fuse(n, c, yo)
    epilogue.place(zi if is_dot and not by_columns else zo)
    sch.parallel(outer)
    sch.unroll(zi)
    groups = 1
    for loop in reversed(taps):
        groups *= extent_of(sch, loop) if by_columns else 1
        if groups <= _MOST_GROUPS:
            sch.unroll(loop)
    if is_dot:
        zeros = sch.decompose_reduction(block, taps[0])
        *_, columns, lanes = sch.get_loops(zeros)
        if by_columns:
            sch.unroll(columns)
        sch.vectorize(lanes)
        mark_lanes(sch, v)
    else:
        sch.vectorize(v)
        sch.decompose_reduction(block, taps[0])
    for producer in padding:
        sch.compute_at(producer, outer, preserve_unit_loops=True)
        _order_padding(sch, producer)


def _reads_four(sch: st.Schedule, block: SBlockRV) -> bool:
    """Whether an instruction adds four rows, or columns, to a sum; a pair of columns has no axis."""
    return len(sch.get(block).iter_vars) > 6


def _reads_four_columns(sch: st.Schedule, block: SBlockRV) -> bool:
    """Whether they are columns: the weights then have an axis for outputs that read the same columns."""
    return len(sch.get(block).reads[1].source.shape) == 6


def _order_padding(sch: st.Schedule, copy: SBlockRV) -> None:
    """Write the padded copy: the zero point where it is a constant, then what is inside it."""
    parts = [copy]
    if len(sch.get(copy).reads) == 1:
        with contextlib.suppress(st.ScheduleError):  # TVM refuses a copy with rows of several planes
            parts.insert(0, sch.decompose_padding(copy, sch.get_loops(copy)[1]))
    for part in parts:
        *_, z, v = sch.get_loops(part)
        _, zi = sch.split(z, [None, min(extent_of(sch, z), _COPIED)])
        sch.unroll(zi)
        sch.vectorize(v)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    *_, lanes = extents_of(sch, sch.get_loops(block)[:5])
    weights = sch.get(block).reads[1].source
    by_columns = _reads_four_columns(sch, block)
    s = space(
        Pictures.of(sch, block, 1),
        target,
        kernel_w=0 if _reads_four(sch, block) else int(weights.shape[2]),
        outputs=int(weights.shape[3]) if by_columns else 0,
        vectors=lanes // target.dot.lanes,
    )
    apply(sch, block, s.decide(choose))
