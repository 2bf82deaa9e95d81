"""Convolution on packed channels, computed directly.

The output is `[N, OC/bo, OH, OW, bo]`, the input `[N, IC/bi, H, W, bi]`, where `bi` may be 1 (the plain
layout, seen as blocks of one). A tile of `oc` blocks x `ow` columns is kept in registers while the reduction
runs; each step broadcasts one input value for each column and multiplies it by `oc` vectors of weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import emit_weights
from builder.kernels.spaces import prefetch, shares
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Columns, Conv2d, Rows
from builder.kernels.spaces.idle_taps import MARK
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of, longer, unroll_all
from builder.kernels.spaces.padded_copy import pad, read_pixels, schedule_pad, worth_reading_once
from builder.kernels.spaces.register_tile import (
    TileChoices,
    best_row_tile,
    best_tile,
    divisors,
    hold_operand,
    multiplies_by_element,
    shorter_inside,
    tilings,
    unroll_rounds,
)
from builder.target.device_target import DeviceTarget

KIND: Final = "conv2d"
_POINTS, _ONE_ROW = Columns(), Rows()  # a window of one element, and a single row
_UNROLLED: Final = 4  # steps of the reduction
_IDLE_SHARE: Final = 0.02  # of the taps of a window read padding: worth a condition for each tap
# Tiles of a flat image that are computed in a round, if there are enough rounds: with few input channels, the
# division that finds a round's tile takes some per cent of the time of a tile.
_TOGETHER: Final = 32


def filled(weight: np.ndarray, inputs: int, outputs: int) -> np.ndarray:
    """Fill `[OC, IC, KH, KW]` with zeros, so that its channels are multiples of `outputs` and `inputs`."""
    o, i, kh, kw = weight.shape
    full = np.zeros((-(-o // outputs) * outputs, -(-i // inputs) * inputs, kh, kw), weight.dtype)
    full[:o, :i] = weight
    return full


def reduction_block(block: int, channels: int) -> int:
    """Return the largest part of a block of the input in which the reduction steps over `channels`.

    At most three of the zeros that fill the last block are then multiplied: four steps are unrolled.
    """
    return math.gcd(block, -(-channels // _UNROLLED) * _UNROLLED) if block % _UNROLLED == 0 else block


def pack_weights(weight: np.ndarray, in_block: int, out_block: int, together: int = 1) -> np.ndarray:
    """Pack `[OC, IC/groups, KH, KW]` as `[OC/bo/t, IC/bi, KH, KW, bi, t, bo]`; fill the last with zeros.

    The `t = together` blocks of a register tile are adjacent: ARM loads vectors in pairs, and streams that
    are a power of two apart would compete for the same lines of the L1 cache.
    """
    full = filled(weight, in_block, out_block * together)
    _, i, kh, kw = full.shape
    full = full.reshape(-1, together, out_block, i // in_block, in_block, kh, kw)
    full = full.transpose(0, 3, 5, 6, 4, 1, 2)
    return np.ascontiguousarray(full)


def packed_weights(weight: te.Tensor, in_block: int, out_block: int, together: int) -> te.Tensor:
    """Return the tensor expression of what `pack_weights` makes of constants."""
    outputs, inputs, kh, kw = (int(d) for d in weight.shape)
    blocks, in_blocks = -(-outputs // (out_block * together)), -(-inputs // in_block)
    is_whole = blocks * together * out_block == outputs and in_blocks * in_block == inputs

    def element(*i: tirx.Var) -> tirx.Expr:
        panel, ic, y, z, ii, t, v = i
        o, c = (panel * together + t) * out_block + v, ic * in_block + ii
        if is_whole:
            return weight[o, c, y, z]
        inside = tirx.all(o < outputs, c < inputs)
        return tirx.if_then_else(inside, weight[o, c, y, z], tirx.const(0, weight.dtype))

    shape = (blocks, in_blocks, kh, kw, in_block, together, out_block)
    return te.compute(shape, element, name="pack_weights")


def emit(layer: Layer) -> relax.Expr:
    """Emit a convolution of float32 as a call of a tensor expression with packed weights."""
    bb, op, blocks, in_block = layer.bb, layer.op, layer.out_blocks, layer.in_block
    if op.groups == 1:  # do not multiply the zeros that fill the last block
        in_block = reduction_block(in_block, op.in_channels)
    once, step, tiles = _tiles_of(op, blocks, in_block, layer.target)
    sizes = (in_block, layer.out_block, tiles.oc)
    packed: relax.Expr
    if isinstance(layer.weight, np.ndarray):
        packed = emit_weights(bb, pack_weights(layer.weight, *sizes))
    else:
        packed = bb.emit(bb.call_te(packed_weights, layer.weight, *sizes, primfunc_name_hint="pack_weights"))

    def compute(data: te.Tensor, w: te.Tensor) -> te.Tensor:
        if once:
            pixels, plain = read_pixels(data, op)
            return convolve(pixels, w, plain, blocks, step)
        return convolve(pad(data, op), w, op, blocks, step)

    return emit_kernel(bb, "conv2d", compute, layer.x, packed)


def _tiles_of(
    op: Conv2d, blocks: int, in_block: int, target: DeviceTarget
) -> tuple[bool, int, ConvolutionTiles]:
    """Return how a convolution is computed.

    `once`: whether the pixels that it reads are copied first.
    `step`: as `_flat_step` returns it.
    `tiles`: the heuristic's.
    """
    pixels = Rows(op.out_height * op.out_width)
    point = op.kernel == (1, 1) and not any(op.padding)
    step = _flat_step(op, in_block, target, points=point)
    if step:
        flat = Sums(blocks, pixels.count, in_block, op.groups, rows=pixels, step=step)
        tiles = flat_space(flat, target).default
        once = worth_reading_once(op, -(-blocks // (op.groups * int(tiles.oc))))
        if not point or once or op.strides == (1, 1):
            return once, step, tiles
    columns = Columns(op.kernel[1], op.strides[1], op.dilation[1])
    tiles = space(Sums(blocks, op.out_width, in_block, op.groups, columns), target).default
    once = tiles.held and worth_reading_once(op, -(-blocks // (op.groups * int(tiles.oc))))
    return once, 0, tiles


def _flat_step(op: Conv2d, in_block: int, target: DeviceTarget, *, points: bool) -> int:
    """Return 0, or the pixels of which a tile has a multiple if the rows of an image are seen as one row.

    `op`: the geometry. Rows stay rows if taps are left out, which is done row by row, or if an output is a
        single product, in which TVM sees no reduction.
    `target`: the device. With 16 registers, or with values in registers as on ARM, a tile has 6 or 7 columns:
        rows stay rows.
    `points`: whether each pixel of the output reads only one pixel of the input. Tiles of other windows have
        whole rows, if at least two of them.
    """
    if op.out_height == 1 or op.out_width == 1 or multiplies_by_element(target) or target.simd.registers < 32:
        return 0
    if _leaves_out_taps(op) or op.in_channels // op.groups * math.prod(op.kernel) == 1:
        return 0
    if points:
        return 1
    return op.out_width if 2 * op.out_width <= _widest_tile(target) and not _is_picture(in_block) else 0


def _widest_tile(target: DeviceTarget) -> int:
    """Return the columns of the widest tile of two vectors whose sums and operands fit the registers."""
    return target.simd.registers // 2 - 2


def _leaves_out_taps(op: Conv2d) -> bool:
    """Whether enough taps of windows read only padding.

    Columns count only for windows with gaps: without gaps, the padding is narrower than a tile of columns, so
    no tile leaves a tap out.
    """
    return max(op.idle_share(0), op.idle_share(1) if op.dilation[1] > 1 else 0.0) > _IDLE_SHARE


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d, out_blocks: int, step: int = 0) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded.

    Of the blocks of weights, the first `out_blocks` are used. `step` is that of `_flat_step`.
    """
    _, in_blocks, kernel_h, kernel_w, in_block, together, out_block = (int(d) for d in w.shape)
    per_group = out_blocks // op.groups
    ic = te.reduce_axis((0, in_blocks), "ic")
    kh = te.reduce_axis((0, kernel_h), "kh")
    kw = te.reduce_axis((0, kernel_w), "kw")
    ii = te.reduce_axis((0, in_block), "ii")
    (sh, sw), (dh, dw) = op.strides, op.dilation
    parts = int(x.shape[4]) // in_block  # blocks of the reduction in a block of the input

    def element(n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        first = 0 if op.groups == 1 else o // per_group * in_blocks
        at = ii if parts == 1 else ic % parts * in_block + ii
        value = x[n, first + ic // parts, y * sh + kh * dh, z * sw + kw * dw, at]
        return te.sum(value * w[o // together, ic, kh, kw, ii, o % together, v], axis=[ic, kh, kw, ii])

    marks: dict[str, Any] = {SPACE_MARK: KIND, "edge.stride": sw, "edge.dilation": dw}
    if _leaves_out_taps(op):
        marks[MARK] = [*op.padding[:2], op.in_height, op.in_width, sh, sw, dh, dw]
    if op.groups > 1:
        marks["edge.groups"] = op.groups
    if step:
        marks["edge.flat"] = step
    return te.compute(
        (op.batch, out_blocks, op.out_height, op.out_width, out_block), element, name="conv", attrs=marks
    )


@dataclass(frozen=True, slots=True)
class ConvolutionTiles:
    """The decisions of the design space.

    `oc`: blocks of output channels held in registers.
    `ow`: output columns held in registers.
    `oh`: output rows that are computed for all channels before the next rows, so that their input stays in
        the L2 cache. If the rows of an image are one row, tiles of columns.
    `ii`: input channels unrolled in the innermost reduction.
    `held`: whether these input values are held in vector registers; see `register_tile.hold_operand`.
    `row_held`: whether, for an input of single channels, the input row that a row of the window reads is
        held.
    `flat`: whether the rows of an image are seen as one row.
    `together`: if so, the tiles that a round of the parallel loop computes.
    """

    oc: Decision
    ow: Decision
    oh: Decision
    ii: Decision
    held: bool = False
    row_held: bool = False
    flat: bool = False
    together: int = 1


@dataclass(frozen=True, slots=True)
class Sums:
    """What a direct convolution computes, as far as its loops depend on it.

    `blocks`, `width`: blocks of channels and columns of the output; a flat image has all pixels in a row.
    `in_block`: input channels in a step of the reduction.
    `groups`: groups of channels; a tile does not cross them.
    `columns`, `rows`: how they read the input. Those of a flat image are a row each, whose rows are pixels.
    `step`: the columns of a tile are a multiple of it.
    """

    blocks: int
    width: int
    in_block: int
    groups: int = 1
    columns: Columns = _POINTS
    rows: Rows = _ONE_ROW
    step: int = 1


def space(sums: Sums, target: DeviceTarget, *, on_stack: bool = True) -> Space[ConvolutionTiles]:
    """Return the design space of a packed convolution.

    The heuristic takes the tile of `register_tile.best_tile` and unrolls the reduction by four, which is
    one vector of a held operand. It takes as many rows as keep their input in the L2 cache while all
    weights are read. `on_stack` is as in `register_tile.best_tile`.
    """
    rows, columns, in_block, step = sums.rows, sums.columns, sums.in_block, sums.step
    ohs, oh = tilings(rows.count, rows.count), rows.at_once(target.core.l2_bytes)
    blocks = sums.blocks // sums.groups
    ocs = tilings(blocks, 8) if sums.groups == 1 else divisors(blocks, 8)
    ows = tuple(step * n for n in tilings(sums.width // step, 32 // step))
    choices = TileChoices((blocks, sums.width), ocs, ows)
    held = multiplies_by_element(target) and in_block % 4 == 0
    if multiplies_by_element(target) and in_block == 1 and columns.window > 1:
        oc, ow = best_row_tile(choices, target, window=columns.window, reach=columns.reach)
        tiles = ConvolutionTiles(oc, ow, oh, 1, row_held=True)
        return Space(tiles, {"oc": ocs, "ow": ows, "ii": (1,), "oh": ohs})
    # Taps of a window with gaps are left out tile by tile, so its tiles have few columns.
    full = on_stack and columns.dilation == 1
    oc, ow = best_tile(choices, target, held=held, crowded=_is_picture(in_block), on_stack=full)
    ii = tuple(d for d in (1, 2, 4, 8, 16) if in_block % d == 0)
    tiles = ConvolutionTiles(oc, ow, oh, min(4, in_block), held)
    return Space(tiles, {"oc": ocs, "ow": ows, "ii": ii, "oh": ohs})


def flat_space(sums: Sums, target: DeviceTarget) -> Space[ConvolutionTiles]:
    """Return the design space of a convolution that sees all rows of an image as one row.

    A tile may then have pixels of several rows: 7 x 7 pixels are four tiles of up to 13, not seven of 7.
    """
    s = space(replace(sums, rows=_ONE_ROW), target)
    d, pixels = s.default, sums.rows
    tiles = Rows(-(-pixels.count // d.ow), pixels.bytes_each * d.ow)
    oh = tiles.at_once(target.core.l2_bytes)
    panels, bands = -(-sums.blocks // d.oc), -(-tiles.count // oh)
    together = max(
        (n for n in divisors(oh, _TOGETHER) if shares.is_even(bands * panels * (oh // n))), default=1
    )
    flat = replace(d, oh=oh, flat=True, together=together)
    return Space(flat, {**s.values, "oh": tilings(tiles.count, tiles.count)})


def _is_picture(in_block: int) -> bool:
    """Whether the input has so few channels that LLVM unrolls the window as well."""
    return in_block % 4 != 0


def apply(sch: st.Schedule, block: SBlockRV, tiles: ConvolutionTiles) -> None:
    """Order the loops of a packed convolution, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    data = sch.get(block).reads[0].source
    plane_bytes = np.dtype(str(data.dtype)).itemsize * math.prod(int(d) for d in data.shape[2:])
    epilogue = Epilogue.after(sch, block)
    if tiles.flat:
        _flatten(sch, block, epilogue.block)
        n, o, z, v, ic, kh, kw, ii = sch.get_loops(block)
        # Factors are decisions, of which TVM can write no formulas.
        yo, yi, zi = sch.split(z, [None, tiles.oh, tiles.ow])
        yi, zo = sch.split(yi, [None, tiles.together])
    else:
        n, o, y, z, v, ic, kh, kw, ii = sch.get_loops(block)
        yo, yi = sch.split(y, [None, tiles.oh])
        zo, zi = sch.split(z, [None, tiles.ow])
    oo, oi = sch.split(o, [None, tiles.oc])
    in_block = extent_of(sch, ii)
    io, iu = sch.split(ii, [None, tiles.ii])
    ordered = tiles.held or tiles.row_held or _is_picture(in_block)
    tile_loops = (oi, zi) if ordered else shorter_inside(sch, oi, zi)
    sch.reorder(n, yo, oo, yi, zo, ic, kh, kw, io, iu, *tile_loops, v)
    if not tiles.held and not tiles.row_held:
        times = extent_of(sch, n) * extent_of(sch, yo)
        # A 1x1 window has no loop over its columns: the first loop of the reduction reads the panel.
        long = longer(sch, (kw, ic, io))
        prefetch.mark(sch, long[0] if tiles.flat and long else kw, rows=extent_of(sch, yi), times=times)
        if not epilogue.apart:
            sch.set_scope(block, 0, "local")
    outer = sch.fuse(n, yo, oo, yi)
    epilogue.place(zo)
    if tiles.held:
        hold_operand(sch, block, io)
        if extent_of(sch, kw) == 1:  # measured: unrolling a wider window spills
            ic = unroll_rounds(sch, ic, plane_bytes)
    if tiles.row_held:
        hold_operand(sch, block, kh)
        sch.unroll(kw)
    sch.parallel(outer)
    sch.vectorize(v)
    unroll_all(sch, zi, oi, iu)
    sch.decompose_reduction(block, ic)
    for producer in padding:
        schedule_pad(sch, producer)


def _flatten(sch: st.Schedule, block: SBlockRV, last: SBlockRV) -> None:
    """Make one axis of the rows and columns of a convolution and of its epilogue, the block `last`.

    Axes of the window and others without extent are no longer those of a reduction.
    """
    width = extent_of(sch, sch.get_loops(block)[3])

    def flat(
        n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var, *rest: tirx.Var
    ) -> tuple[tirx.Expr, ...]:
        return (n, o, y * width + z, v, *rest)

    image, products = (tirx.IndexMap.from_func(flat, ndim=axes) for axes in (5, 9))
    sch.transform_layout(block, ("write", 0), image)
    sch.transform_block_layout(block, products)
    sch.transform_block_layout(last, image)


def _step(sch: st.Schedule, block: SBlockRV) -> int:
    """Return the anchor's step; 0 if what is fused to the convolution changes the picture."""
    shape, stored = _shapes(sch, block)
    return int(sch.get(block).annotations.get("edge.flat", 0)) if shape == stored else 0


def _shapes(sch: st.Schedule, block: SBlockRV) -> list[list[int]]:
    """Return the shapes of what a convolution computes, and of what the last block fused to it stores."""
    last = block
    while consumers := sch.get_consumers(last):
        last = consumers[0]
    return [[int(d) for d in sch.get(b).writes[0].source.shape] for b in (block, last)]


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    _, blocks, height, width, _, _, _, window, in_block = extents_of(sch, sch.get_loops(block))
    marks = sch.get(block).annotations
    data = sch.get(block).reads[0].source
    groups = int(marks.get("edge.groups", 1))
    if step := _step(sch, block):
        pixels = Rows.of(height * width, data)
        s = flat_space(Sums(blocks, pixels.count, in_block, groups, rows=pixels, step=step), target)
    else:
        columns = Columns(window, int(marks["edge.stride"]), int(marks["edge.dilation"]))
        image = (int(marks[MARK][2]), int(marks[MARK][3])) if MARK in marks else None
        s = space(Sums(blocks, width, in_block, groups, columns, Rows.of(height, data, image)), target)
    if _is_gate(sch, block):
        oc = shares.blocks_of_a_round(blocks, s.values["oc"], s.default.oc)
        s = replace(s, default=replace(s.default, oc=oc))
    apply(sch, block, s.decide(choose))


def _is_gate(sch: st.Schedule, block: SBlockRV) -> bool:
    """Whether the convolution has a single pixel, and the epilogue multiplies a whole picture by it.

    Then the picture takes the time, and a round of the parallel loop has as many of its channels as a tile.
    """
    pixels, elements = map(math.prod, _shapes(sch, block))
    height, width = extents_of(sch, sch.get_loops(block)[2:4])
    return height * width == 1 and elements > pixels
