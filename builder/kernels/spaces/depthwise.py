"""Depthwise convolution on packed channels: each channel has its own filter, and a block is a vector."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import emit_weights, shape_of
from builder.kernels.spaces import shares
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of
from builder.kernels.spaces.padded_copy import pad
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "depthwise"
# A larger window stays a loop: unrolled, it would be more code than a core keeps decoded, and would take
# LLVM longer.
MOST_TAPS: Final = 81


def emit(layer: Layer) -> relax.Expr:
    """Emit a depthwise convolution, whose output has the blocks of its input.

    Bytes become float32 as they are padded.
    """
    bb, op, b = layer.bb, layer.op, layer.in_block
    blocks = shape_of(layer.x)[1]
    packed: relax.Expr
    if isinstance(layer.weight, np.ndarray):
        full = np.zeros((blocks * b, *op.kernel), layer.weight.dtype)
        full[: op.in_channels] = layer.weight[:, 0]
        packed = emit_weights(
            bb, np.ascontiguousarray(full.reshape(blocks, b, *op.kernel).transpose(0, 2, 3, 1))
        )
    else:
        packed = bb.emit(bb.call_te(packed_weights, layer.weight, b, primfunc_name_hint="pack_weights"))

    def compute(data: te.Tensor, w: te.Tensor, *point: te.Tensor) -> te.Tensor:
        return convolve(_numbers(data, point[0], op) if point else pad(data, op), w, op)

    operands = [layer.x, packed, *([] if layer.zero is None else [layer.zero])]
    name = "depthwise" if layer.zero is None else "integer_depthwise"
    return emit_kernel(bb, name, compute, *operands)


def packed_weights(weight: te.Tensor, block: int) -> te.Tensor:
    """Return the tensor expression of `[C, 1, KH, KW]` packed as `[C/b, KH, KW, b]`."""
    channels, _, kh, kw = (int(d) for d in weight.shape)
    blocks = -(-channels // block)

    def element(c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = weight[c * block + v, 0, y, z]
        if channels % block == 0:
            return value
        return tirx.if_then_else(c * block + v < channels, value, tirx.const(0, weight.dtype))

    return te.compute((blocks, kh, kw, block), element, name="pack_weights")


def _numbers(x: te.Tensor, zero: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return packed bytes, less their zero point, as float32 numbers with zeros around them."""
    top, left, bottom, right = op.padding
    n, c, h, w, b = (int(d) for d in x.shape)

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = (x[i, o, y - top, z - left, v].astype("int32") - zero()).astype("float32")
        if not any(op.padding):
            return value
        inside = tirx.all(y >= top, y < h + top, z >= left, z < w + left)
        return tirx.if_then_else(inside, value, tirx.const(0.0, "float32"))

    return te.compute((n, c, h + top + bottom, w + left + right, b), element, name="pad")


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded."""
    blocks, kernel_h, kernel_w, block = (int(d) for d in w.shape)
    kh = te.reduce_axis((0, kernel_h), "kh")
    kw = te.reduce_axis((0, kernel_w), "kw")
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def element(n: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = x[n, c, y * sh + kh * dh, z * sw + kw * dw, v]
        return te.sum(value * w[c, kh, kw, v], axis=[kh, kw])

    return te.compute(
        (op.batch, blocks, op.out_height, op.out_width, block),
        element,
        name="depthwise",
        attrs={SPACE_MARK: KIND},
    )


@dataclass(frozen=True, slots=True)
class DepthwiseTiles:
    """The decisions of the design space.

    `ow`: output columns held in registers.
    `oh`: output rows computed together. The input that they read is padded into a buffer that stays in the L2
        cache; a padded copy of the whole input would go through memory.
    `zeros_first`: whether to fill that buffer with zeros and then copy the input into it, rather than choose
        between the two for each column. With narrow vectors that takes a third of the time; with wide ones it
        writes too much.
    """

    ow: Decision
    oh: Decision
    zeros_first: bool = False


@dataclass(frozen=True, slots=True)
class Pictures:
    """What a depthwise convolution computes, as far as its loops depend on it.

    `height`, `width`: of the output.
    `row_bytes`: bytes of the input that one row of the output reads.
    `blocks`: blocks of channels, in all pictures of the batch.
    `again`: as in `shares.rows_of_a_round`.
    """

    height: int
    width: int
    row_bytes: int = 1
    blocks: int = 1
    again: float = 0.0

    @classmethod
    def of(cls, sch: st.Schedule, block: SBlockRV, itemsize: int) -> Pictures:
        """Return what an anchor computes; a number of its padded input has `itemsize` bytes."""
        batch, blocks, height, width, lanes = extents_of(sch, sch.get_loops(block)[:5])
        in_rows, in_width = (int(d) for d in sch.get(block).reads[0].source.shape[2:4])
        row_bytes = round(itemsize * lanes * in_width * in_rows / height)
        return cls(height, width, row_bytes, batch * blocks, shares.rows_again(height, in_rows))

    def rows_of_a_round(self, most: int) -> int:
        """Return how many rows, up to `most`, are computed together."""
        return shares.rows_of_a_round(self.height, self.blocks, most, self.again)


def space(pictures: Pictures, kernel_w: int, target: DeviceTarget, stride: int = 1) -> Space[DepthwiseTiles]:
    """Return the design space of a depthwise convolution.

    The heuristic takes as many columns as leave registers for what they read and for a row of the filter, and
    as many rows as keep their input in a quarter of the L2 cache and leave enough rounds for all cores.
    """
    ows, ohs = tilings(pictures.width, 32), tilings(pictures.height, pictures.height)
    narrow = target.simd.lanes <= 4
    registers = target.simd.registers
    # A long row of a filter is not held in registers: its elements are loaded one by one.
    held = kernel_w if kernel_w <= registers // 2 else 1
    most = max(1, (registers - held) // (1 + stride) if narrow else (registers - held - 2) // 2)
    rows = max(1, target.core.l2_bytes // 4 // pictures.row_bytes)
    ow, oh = max(w for w in ows if w <= most), pictures.rows_of_a_round(rows)
    return Space(DepthwiseTiles(ow, oh, narrow), {"ow": ows, "oh": ohs})


def apply(sch: st.Schedule, block: SBlockRV, tiles: DepthwiseTiles, lanes: int) -> None:
    """Order the loops of a depthwise convolution, of its padding and of its epilogue.

    A block of bytes may have several vectors of float32, of `lanes` each; float16 has twice as many lanes.
    """
    epilogue = Epilogue.after(sch, block)
    n, c, y, z, v, kh, kw = sch.get_loops(block)
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    wide = extent_of(sch, v) > lanes
    vectors = []
    if wide:
        vo, v = sch.split(v, [None, lanes])
        vectors = [vo]
    sch.reorder(n, c, yo, yi, zo, *vectors, kh, kw, zi, v)
    outer = sch.fuse(n, c, yo)
    padding = sch.get_producers(block)
    epilogue.place(zo)
    sch.parallel(outer)
    sch.vectorize(v)
    taps = extents_of(sch, (kh, kw))
    for loop in (zi, kw, kh) if math.prod(taps) <= MOST_TAPS else (zi,):
        sch.unroll(loop)
    sch.decompose_reduction(block, kh)
    for producer in padding:
        order_padding(sch, producer, outer, zeros_first=tiles.zeros_first)


def order_padding(sch: st.Schedule, block: SBlockRV, loop: LoopRV, *, zeros_first: bool) -> None:
    """Compute the padded copy `block` inside `loop`, where what it reads is needed."""
    sch.compute_at(block, loop, preserve_unit_loops=True)
    parts = [block]
    if zeros_first and not _converts(sch, block):
        # TVM refuses a copy of whose padding nothing is read, and one of rows with gaps between them.
        with contextlib.suppress(st.ScheduleError):
            parts.insert(0, sch.decompose_padding(block, sch.get_loops(block)[1]))
    for part in parts:
        *_, z, v = sch.get_loops(part)
        if len(parts) > 1:
            _, zi = sch.split(z, [None, max(tilings(extent_of(sch, z), 16))])
            sch.unroll(zi)
        sch.vectorize(v)


def _converts(sch: st.Schedule, block: SBlockRV) -> bool:
    """Whether a padded copy also converts bytes."""
    region = sch.get(block)
    return str(region.reads[0].source.dtype) != str(region.writes[0].source.dtype)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    pictures, kernel_w = Pictures.of(sch, block, 4), extent_of(sch, sch.get_loops(block)[-1])
    in_width = int(sch.get(block).reads[0].source.shape[3])
    s = space(pictures, kernel_w, target, max(1, in_width // pictures.width))
    halves = str(sch.get(block).writes[0].source.dtype) == "float16"
    apply(sch, block, s.decide(choose), target.simd.lanes * (2 if halves else 1))
