"""Depthwise convolution of bytes on packed channels, with int32 sums.

The input and the output are `[N, C/b, H, W, b]`; a channel's lane has its own filter. Several taps are added
to a sum at once, in one of two ways:

- Four rows of a column, by an instruction that adds the products of four adjacent bytes
  (`builder.target.dot`). The bytes of four rows are interleaved in registers, once for all columns of outputs
  that read them. Rows that the window does not have are multiplied by zeros.
- Two columns of a row: their products are added in 16 bits, and the sum is added in 32. That is exact unless
  both weights are -128 (`taps_at_once`).

Without either, float32 is as fast: `depthwise` converts the bytes, and its sums are exact too.

As in `integer_convolution`, padding is the zero point, and what it adds to the sums is left to the caller.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st

from builder.kernels.decisions import Chooser, Decision
from builder.kernels.rewriter import constant_of, shape_of
from builder.kernels.signature import SPACE_MARK
from builder.kernels.spaces import shares
from builder.kernels.spaces.dot_loops import mark_lanes
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, Epilogue
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.padded_copy import pad
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "integer_depthwise"

_ROWS: Final = 4  # rows that are interleaved
_PAIR: Final = 2  # columns whose products are added in 16 bits
# With fewer rows, most products would have a zero as a factor.
_FEWEST_ROWS: Final = 3
# Counted on a Cortex-A72, over float32: pairs of 3x3 take 0.58 of the instructions, 5x5 0.71, 7x7 1.01.
_MOST_TAPS: Final = 25
# The largest sum of two weights' magnitudes: times 128, it fits into 16 bits.
_LARGEST_PAIR: Final = 255
# Vectors of sums whose bytes are interleaved together. Counted on a Cortex-A76, over twice as many: windows
# of 3x3 take 0.90 of the instructions at stride 1, 0.81 at stride 2.
_INTERLEAVED: Final = 16
# Columns of the input that are copied together.
_COPIED: Final = 8


def taps_at_once(weight: np.ndarray, target: DeviceTarget) -> int:
    """Return how many taps are added to a sum at once: 4 rows, or 2 columns; 0 if float32 is as fast.

    Parameters
    ----------
    weight
        `[C, 1, KH, KW]`, int8.
    target
        The device.
    """
    dot = target.dot
    if dot.group == _ROWS and dot.name and not dot.halves and weight.shape[2] >= _FEWEST_ROWS:
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


def emit(
    bb: relax.BlockBuilder,
    op: Conv2d,
    x: relax.Expr,
    zero: relax.Expr,
    weight: np.ndarray,
    target: DeviceTarget,
) -> relax.Expr:
    """Emit the depthwise convolution of packed `x` as a call of a tensor expression with packed weights.

    Parameters
    ----------
    bb
        Receives the call.
    op
        The geometry.
    x
        The input, `[N, C/b, H, W, b]`, of the dtype that `target.dot` takes.
    zero
        Its zero point, int32, a scalar.
    weight
        `[C, 1, KH, KW]`, int8, for which `taps_at_once` is not 0.
    target
        Its instruction decides which taps are added at once.

    Returns
    -------
    relax.Expr
        The sums of `x * weight`, `[N, C/b, OH, OW, b]`, int32.
    """
    _, blocks, _, _, b = shape_of(x)
    kernel_h, kernel_w = op.kernel
    rows = taps_at_once(weight, target) == _ROWS
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
    number = constant_of(zero)

    def compute(data: te.Tensor, w: te.Tensor, *point: te.Tensor) -> te.Tensor:
        kind = str(data.dtype)
        value = point[0]().astype(kind) if number is None else tirx.const(int(number), kind)
        padded = pad(data, around, value)
        return (_four_rows if rows else _two_columns)(padded, w, op)

    operands = [x, relax.const(np.ascontiguousarray(packed)), *([zero] if number is None else [])]
    call = bb.call_te(
        compute, *operands, primfunc_name_hint="integer_depthwise", primfunc_attrs=FUSES_ELEMENTWISE
    )
    return bb.emit(call)


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

    Attributes
    ----------
    ow
        Output columns that are unrolled, so that they share what they read.
    oh
        Output rows computed together: the input that they read is padded into a buffer that stays in the L2
        cache.
    """

    ow: Decision
    oh: Decision


@dataclass(frozen=True, slots=True)
class IntegerDepthwiseSpace:
    """The values that each decision may take, and the heuristic's choice among them."""

    ow: tuple[int, ...]
    oh: tuple[int, ...]
    default: IntegerDepthwiseTiles


def space(
    out_height: int,
    out_width: int,
    row_bytes: int,
    target: DeviceTarget,
    *,
    kernel_w: int = 0,
    vectors: int = 1,
    blocks: int = 1,
    again: float = 0.0,
) -> IntegerDepthwiseSpace:
    """Return the design space of a depthwise convolution of bytes.

    Parameters
    ----------
    out_height, out_width
        Rows and columns of the output.
    row_bytes
        Bytes of the input that one output row reads.
    target
        The device.
    kernel_w
        Columns of the window if pairs of them are added at once: as many outputs are computed together as
        leave registers for what they read and for a row of weights. 0 if four rows are added at once: then
        the sums of a column are complete before those of the next one begin.
    vectors
        Vectors of sums of a column. LLVM interleaves the bytes of all columns before it adds products, and
        spills them if they are too many.
    blocks
        Blocks of channels, in all pictures of the batch.
    again
        As in `shares.rows_of_a_round`.
    """
    ows, ohs = tilings(out_width, 16), tilings(out_height, out_height)
    together = _INTERLEAVED // max(2, vectors)
    most = max(1, (target.simd.registers - 2 - 2 * kernel_w) // 5) if kernel_w else together
    high = max(1, target.core.l2_bytes // 4 // row_bytes)
    ow, oh = max(w for w in ows if w <= most), shares.rows_of_a_round(out_height, blocks, high, again)
    return IntegerDepthwiseSpace(ows, ohs, IntegerDepthwiseTiles(ow, oh))


def apply(sch: st.Schedule, block: st.schedule.SBlockRV, tiles: IntegerDepthwiseTiles) -> None:
    """Order the loops of a depthwise convolution of bytes, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    n, c, y, z, v, *taps = sch.get_loops(block)
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    if len(taps) > 1:
        *taps, row = taps
        sch.reorder(n, c, yo, yi, zo, zi, *taps, v, row)
    else:
        sch.reorder(n, c, yo, yi, zo, *taps, zi, v)
    outer = sch.fuse(n, c, yo)
    epilogue.place(zi if len(taps) > 1 else zo)
    sch.parallel(outer)
    for loop in (zi, *taps):
        sch.unroll(loop)
    if len(taps) > 1:
        zeros = sch.decompose_reduction(block, taps[0])
        sch.vectorize(sch.get_loops(zeros)[-1])
        mark_lanes(sch, v)
    else:
        sch.vectorize(v)
        sch.decompose_reduction(block, taps[0])
    for producer in padding:
        sch.compute_at(producer, outer, preserve_unit_loops=True)
        _order_padding(sch, producer)


def _order_padding(sch: st.Schedule, copy: st.schedule.SBlockRV) -> None:
    """Write the padded copy: the zero point where it is a constant, then what is inside it."""
    parts = [copy]
    if len(sch.get(copy).reads) == 1:
        with contextlib.suppress(st.ScheduleError):  # TVM refuses a copy with rows of several planes
            parts.insert(0, sch.decompose_padding(copy, sch.get_loops(copy)[1]))
    for part in parts:
        *_, z, v = sch.get_loops(part)
        _, zi = sch.split(z, [None, min(int(sch.get(z).extent), _COPIED)])
        sch.unroll(zi)
        sch.vectorize(v)


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    extents = [int(sch.get(loop).extent) for loop in sch.get_loops(block)]
    batch, blocks, height, width, lanes, *taps = extents
    data, weights = (region.source for region in sch.get(block).reads)
    in_rows = int(data.shape[2])
    row_bytes = round(lanes * int(data.shape[3]) * in_rows / height)
    kernel_w = int(weights.shape[2]) if len(taps) == 1 else 0
    s = space(
        height,
        width,
        row_bytes,
        target,
        kernel_w=kernel_w,
        vectors=lanes // target.dot.lanes,
        blocks=batch * blocks,
        again=shares.rows_again(height, in_rows),
    )
    tiles = IntegerDepthwiseTiles(choose("ow", s.ow, s.default.ow), choose("oh", s.oh, s.default.oh))
    apply(sch, block, tiles)
