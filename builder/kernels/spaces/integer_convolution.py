"""Convolution of small integers on packed channels, with int32 sums.

The input is `[N, IC/bi, H, W, bi]` of `uint8` or `int8`, the output `[N, OC/bo, OH, OW, bo]` of int32. As in
`convolution`, a tile of `oc` blocks x `ow` columns stays in registers while the reduction runs. Each step
takes a group of adjacent input channels, as the core's instruction does (`builder.target.dot`): weights are
packed `[OC/bo/t, IC/bi, KH, KW, bi/g, t, bo, g]`. The sums are exact, or wrap around as int32.

The operator pads with the zero point, which stands for the number 0. What the zero point adds to the sums is
a constant for each output channel, and left to the caller.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import constant_of
from builder.kernels.spaces import prefetch
from builder.kernels.spaces.convolution import filled
from builder.kernels.spaces.dot_loops import group_axes, in_pairs, lane_index, mark_dot, member, words_group
from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of, unroll_all
from builder.kernels.spaces.padded_copy import pad, read_pixels, schedule_pad, worth_reading_once
from builder.kernels.spaces.register_tile import TileChoices, hold_operand, tilings
from builder.target.device_target import DeviceTarget
from builder.target.dot import TILE

KIND: Final = "integer_conv2d"
# Products of a row of the window that are unrolled for a tile.
_MOST_UNROLLED: Final = 320
# Of a padded row of pixels with few bytes, at a time.
_COPIED_BYTES: Final = 64
# Pixels with fewer bytes are copied several at a time. With more, it takes longer to fill rows before.
_PIXEL_BYTES: Final = 16


def block_of(channels: int, target: DeviceTarget) -> int:
    """Return the block in which `channels` are packed: the one with the least padding, then the largest.

    A block has whole groups and whole vectors of sums. If the core has tiles, it is a row of one or a vector.
    """
    dot = target.dot
    smaller = dot.lanes if dot.block == TILE.bytes else dot.block // 2
    blocks = [b for b in (dot.block, smaller) if b % dot.group == 0 and b >= max(4, dot.lanes)]
    return min(blocks, key=lambda b: (-(-channels // b) * b, -b))


def in_block_of(channels: int, target: DeviceTarget) -> int:
    """Return the block in which an input of `channels` is packed: a single group if they fit it."""
    return 4 if channels <= 4 == target.dot.group else block_of(channels, target)


def pack_weights(weight: np.ndarray, in_block: int, out_block: int, together: int, group: int) -> np.ndarray:
    """Pack `[OC, IC, KH, KW]` as `[OC/bo/t, IC/bi, KH, KW, bi/g, t, bo, g]`; fill the last with zeros."""
    full = filled(weight, in_block, out_block * together)
    _, i, kh, kw = full.shape
    full = full.reshape(-1, together, out_block, i // in_block, in_block // group, group, kh, kw)
    return np.ascontiguousarray(full.transpose(0, 3, 6, 7, 4, 1, 2, 5))


def emit(layer: Layer) -> relax.Expr:
    """Emit a convolution of bytes without groups.

    The bytes are of the type that `target.dot` takes, or of either if that is int16.
    """
    op, dot, in_block, out_block = layer.op, layer.target.dot, layer.in_block, layer.out_block
    blocks, weight = layer.out_blocks, layer.numbers
    group = words_group(lambda g: pack_weights(weight, in_block, out_block, 1, g), dot, in_block)
    oc = space(blocks, op.out_width, out_block, layer.target, group=group).default.oc
    packed = pack_weights(weight, in_block, out_block, oc, group)
    dtype = dot.data
    if dot.halves and group > 1:
        packed = in_pairs(packed)
    elif dot.halves:
        dtype = "int16"
    once = dot.held and worth_reading_once(op, -(-blocks // oc))

    def compute(data: te.Tensor, w: te.Tensor, value: tirx.Expr) -> te.Tensor:
        if once:
            pixels, plain = read_pixels(data, op, dtype)
            return convolve(pixels, w, plain, blocks)
        return convolve(pad(data, op, value, dtype), w, op, blocks)

    number = padding_number(layer, in_block * np.dtype(dtype).itemsize)
    return layer.emit_bytes("integer_conv2d", packed, number, dtype, compute)


def padding_number(layer: Layer, pixel_bytes: int) -> int | None:
    """Return the zero point if it is known and written into the kernel, else None.

    Kernels that differ only by their zero point are one, unless its padding is to be written at once.
    """
    number = constant_of(layer.zero) if pixel_bytes < _PIXEL_BYTES else None
    return None if number is None else int(number)


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d, out_blocks: int) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded."""
    _, in_blocks, kernel_h, kernel_w, groups, together, *lanes = (int(d) for d in w.shape)
    halves = len(lanes) > 2
    group = int(x.shape[4]) // groups
    out_block = math.prod(lanes) // group
    ic = te.reduce_axis((0, in_blocks), "ic")
    kh = te.reduce_axis((0, kernel_h), "kh")
    kw = te.reduce_axis((0, kernel_w), "kw")
    iq = te.reduce_axis((0, groups), "iq")
    ig = group_axes(group, halves=halves)
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def element(n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = x[n, ic, y * sh + kh * dh, z * sw + kw * dw, iq * group + member(ig)].astype("int32")
        factor = w[(o // together, ic, kh, kw, iq, o % together, *lane_index(v, ig))].astype("int32")
        return te.sum(value * factor, axis=[ic, kh, kw, iq, *ig])

    return te.compute(
        (op.batch, out_blocks, op.out_height, op.out_width, out_block),
        element,
        name="conv",
        attrs={SPACE_MARK: KIND, "edge.stride": sw, "edge.dilation": dw},
    )


@dataclass(frozen=True, slots=True)
class IntegerTiles:
    """The decisions of the design space.

    `oc`: blocks of output channels held in registers.
    `ow`: output columns held in registers.
    `oh`: output rows that are computed for all channels before the next rows.
    `iq`: groups of input channels unrolled in the innermost reduction.
    """

    oc: Decision
    ow: Decision
    oh: Decision
    iq: Decision


def space(
    out_blocks: int,
    out_width: int,
    out_block: int,
    target: DeviceTarget,
    rows: Rows | None = None,
    groups: int = 1,
    group: int = 1,
) -> Space[IntegerTiles]:
    """Return the design space of an integer convolution.

    The heuristic takes the tile with the fewest loads of those that fit the registers. If data are held in 32
    registers, it unrolls a block of input channels.

    `rows`: how output rows read the input; None for a single row.
    `groups`: groups of channels in a block of the input.
    """
    rows = rows or Rows()
    ocs, ows = tilings(out_blocks, 4), tilings(out_width, 16)
    choices = TileChoices((out_blocks, out_width), ocs, ows)
    oc, ow = choices.least(lambda v, c: tile_cost(v, c, out_block, target, group))
    ohs, oh = tilings(rows.count, rows.count), rows.at_once(target.core.l2_bytes)
    iqs = tuple(d for d in (1, 2, 4, 8) if groups % d == 0)
    # With a few registers or without held data, LLVM spills sums when it sees several groups at once.
    iq = max(iqs) if target.dot.held and target.simd.registers >= 32 else 1
    return Space(IntegerTiles(oc, ow, oh, iq), {"oc": ocs, "ow": ows, "oh": ohs, "iq": iqs})


def tile_cost(vectors: int, columns: int, width: int, target: DeviceTarget, group: int = 1) -> float | None:
    """Return the loads of a step of a tile, None if its sums do not fit the registers.

    `vectors`, `columns`: the tile: `vectors` times `width` sums for each of `columns`.
    `width`: sums that are adjacent in memory.
    """
    registers = target.simd.registers
    weights = vectors * -(-width // target.simd.lanes)
    if target.dot.held:
        repeated = columns * max(1, group // target.dot.group)
        # For a core that works in order, LLVM loads the weights of a longer group early.
        early = target.core.in_order and group > target.dot.group
        others = (weights + 4 if early else min(weights, 4)) + repeated + (5 if target.dot.halves else 2)
        if weights * columns + others > registers:
            return None
        # Each half of a group of data is repeated in a vector, and weights are loaded in pairs.
        return weights / 2 + columns * 9 / 4 + 1 if target.dot.halves else weights + columns / 4 + 1
    # Measured for 32 registers: with half of them as sums, LLVM spills if it unrolls a short reduction, and
    # a product of matrices takes a tenth longer than with one sum less.
    most = registers // 2 - 1 if registers >= 32 else registers // 2
    return 2 * weights + columns + 1 if weights * columns <= most else None


def apply(sch: st.Schedule, block: SBlockRV, tiles: IntegerTiles, target: DeviceTarget) -> None:
    """Order the loops of an integer convolution, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, ic, kh, kw, iq, *ig = sch.get_loops(block)
    oo, oi = sch.split(o, [None, tiles.oc])
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    is_prefetched = not target.dot.held and _worth_prefetching(sch, tiles, zo, (kh, kw, iq, oi, v, *ig))
    group = math.prod(extents_of(sch, ig))
    is_group = extent_of(sch, iq) == 1 < group and not is_longer_group(sch, ig, target)
    io, iu = sch.split(iq, [None, tiles.iq])
    *vectors, v = lane_loops(sch, v, len(ig))
    if is_longer_group(sch, ig, target):
        # Weights of a vector are then read for all columns before those of the next: they take few registers.
        sch.reorder(n, yo, oo, yi, zo, ic, kh, kw, io, iu, oi, *vectors, zi, v, *ig)
    else:
        sch.reorder(n, yo, oo, yi, zo, ic, kh, kw, io, iu, oi, zi, *vectors, v, *ig)
    if _has_short_rounds(sch, (kh, kw), ic, target):
        ic, inner = sch.split(ic, [None, 2])
        sch.unroll(inner)
    if is_prefetched:
        prefetch.mark(sch, ic, rows=tiles.oh)
    outer = sch.fuse(n, yo, oo, yi)
    epilogue.place(zo)
    if target.dot.held and is_group:
        _hold_row(sch, block, kh)
        sch.unroll(kw)
    elif target.dot.held and _shares_columns(sch, block, (kw, io, oi, zi, iu), target):
        hold_operand(sch, block, kh)
        sch.unroll(kw)
    elif target.dot.held:
        hold_operand(sch, block, io)
    sch.parallel(outer)
    unroll_all(sch, zi, oi, iu, *vectors)
    start_sums(sch, block, ic)
    mark_dot(sch, v)
    for producer in padding:
        order_padding(sch, producer)


def _has_short_rounds(
    sch: st.Schedule, window: Sequence[LoopRV], blocks: LoopRV, target: DeviceTarget
) -> bool:
    """Whether the loop over `blocks` of input channels takes much of its time for itself.

    So it is with SDOT and a window of one element: 80 products for a tile. Two rounds are then unrolled if a
    loop remains; without any, LLVM spills (`register_tile.unroll_rounds`).
    """
    if target.dot.halves or not target.dot.name or not target.dot.held:
        return False
    extent = extent_of(sch, blocks)
    return all(extent_of(sch, loop) == 1 for loop in window) and extent % 2 == 0 and extent > 2


def _shares_columns(sch: st.Schedule, block: SBlockRV, loops: Sequence[LoopRV], target: DeviceTarget) -> bool:
    """Whether the columns that a row of the window reads for a tile overlap, and fit the registers.

    A row of 3x3 reads 7 columns for a tile of 5; one by one, its columns read 15.

    `loops`: those over the columns of the window, over parts of a block of input channels, over the blocks
        and the columns of a tile, and over the groups of a part.
    """
    kernel_w, parts, oc, ow, groups = extents_of(sch, loops)
    steps = sch.get(block).annotations
    # Halves of a group are repeated in a vector for each product, whether or not their column is held.
    if target.dot.halves or not target.dot.name or kernel_w == 1 or parts > 1:
        return False
    if int(steps["edge.stride"]) != 1 or int(steps["edge.dilation"]) != 1:
        return False
    vectors = oc * -(-int(sch.get(block).writes[0].source.shape[-1]) // target.dot.lanes)
    registers = vectors * ow + ow + kernel_w - 1 + min(vectors, 4)
    return registers <= target.simd.registers and vectors * ow * groups * kernel_w <= _MOST_UNROLLED


def _hold_row(sch: st.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Load the pixels that a row of the window reads for a tile into vector registers, several in each.

    A pixel is a single group, so few bytes that a vector of its own would take several instructions to fill.
    """
    copy = sch.cache_read(block, 0, "local", consumer_blocks=[block])
    sch.compute_at(copy, loop, preserve_unit_loops=True)
    *_, columns, channels = sch.get_loops(copy)
    itemsize = np.dtype(str(sch.get(copy).writes[0].source.dtype)).itemsize
    rounds, vector = sch.split(sch.fuse(columns, channels), [None, _PIXEL_BYTES // itemsize])
    sch.unroll(rounds)
    sch.vectorize(vector)


def order_padding(sch: st.Schedule, copy: SBlockRV) -> None:
    """Order the loops of the padded copy.

    If a pixel has few bytes, a test for each pixel takes longer than to copy it. So rows are filled with the
    zero point if it is a constant, and then copied into, both as whole vectors.
    """
    itemsize = np.dtype(str(sch.get(copy).writes[0].source.dtype)).itemsize
    *rows, columns, channels = sch.get_loops(copy)
    in_pixel = extent_of(sch, channels)
    if len(sch.get(copy).reads) != 1 or len(rows) != 3 or in_pixel * itemsize >= _PIXEL_BYTES:
        schedule_pad(sch, copy)
        return
    parts = [copy]
    outer = sch.fuse(*rows)
    with contextlib.suppress(st.ScheduleError):  # only widened to int16, without padding
        parts.append(sch.decompose_padding(copy, columns))
    sch.parallel(outer)
    for part in parts:
        *_, columns, channels = sch.get_loops(part)
        vector = min(_COPIED_BYTES // itemsize, in_pixel * extent_of(sch, columns))
        sch.vectorize(sch.split(sch.fuse(columns, channels), [None, vector])[1])


def _worth_prefetching(
    sch: st.Schedule, tiles: IntegerTiles, columns: LoopRV, step: Sequence[LoopRV]
) -> bool:
    """Whether each tile can prefetch at least a line of cache in a round of the loop over input blocks.

    A panel of weights serves the tiles of `tiles.oh` rows. If there are many, a panel is read so often from
    the caches that it hardly matters that the first tile waits for it.

    `step`: the loops over the weights of a round.
    """
    weights = math.prod(extents_of(sch, step))
    served = tiles.oh * extent_of(sch, columns)
    return bool(weights >= prefetch.LINE_BYTES * served)


def lane_loops(sch: st.Schedule, loop: LoopRV, axes: int) -> list[LoopRV]:
    """Return the loop over lanes, with one over vectors before it if a group has halves, so two `axes`."""
    return [loop] if axes == 1 else list(sch.split(loop, [None, 4]))


def is_longer_group(sch: st.Schedule, loops: Sequence[LoopRV], target: DeviceTarget) -> bool:
    """Whether the group of these loops is longer than that of the instruction (`dot_loops.words_group`)."""
    return math.prod(extents_of(sch, loops)) > target.dot.group


def start_sums(sch: st.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Set the sums of a tile to zero before `loop`, as vectors."""
    zeros = sch.decompose_reduction(block, loop)
    *_, vectors, lanes = sch.get_loops(zeros)
    sch.unroll(vectors)
    sch.vectorize(lanes)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    extents = extents_of(sch, sch.get_loops(block))
    _, blocks, height, width, out_block, _, _, _, groups, *group = extents
    rows = Rows.of(height, sch.get(block).reads[0].source)
    tiles = space(blocks, width, out_block, target, rows, groups, math.prod(group)).decide(choose)
    apply(sch, block, tiles, target)
