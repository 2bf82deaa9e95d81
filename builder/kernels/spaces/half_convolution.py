"""Convolution on packed channels in float16, with sums in float32.

The input is `[N, IC/bi, H, W, bi]`, float16, and the result `[N, OC/bo, OH, OW, bo]`, float32: what follows,
such as a bias, is computed before the result is rounded. A single chunk may have a float16 result. A tile of
`oc` blocks x `ow` columns of one chunk of products is kept in registers (`half_sums`); their float32 sums are
in the L1 cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.spaces.convolution import filled
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.half_sums import chunk_of
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extents_of, unroll_all
from builder.kernels.spaces.padded_copy import pad, schedule_pad
from builder.kernels.spaces.register_tile import (
    TileChoices,
    best_tile,
    divisors,
    even_part,
    hold_operand,
    multiplies_by_element,
    tilings,
)
from builder.target.device_target import DeviceTarget

KIND: Final = "half_conv2d"
# ARM takes an element of 16 bits from the first 16 registers only. With fewer than four free ones, LLVM often
# moves held values there in each step: tiles of 3 x 7 took 1.31 instructions for a product, those of 2 x 7
# 1.15. Winograd's products, whose tiles are 3 x 7, hardly suffer.
_SPARE: Final = 4


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of a reduction that is summed in float16.

    `blocks`, `rows`, `columns`: blocks of input channels, and rows and columns of the window.
    """

    blocks: int
    rows: int
    columns: int

    @classmethod
    def of(cls, blocks: int, kernel: tuple[int, int], in_block: int) -> Chunk:
        """Divide a reduction over `blocks` blocks of `in_block` channels and a window."""
        return cls(*chunk_of((blocks, *kernel), in_block))


def pack_weights(
    weight: np.ndarray, in_block: int, out_block: int, together: int, chunk: Chunk
) -> np.ndarray:
    """Pack `[OC, IC/groups, KH, KW]` in the order in which a tile reads it, filled with zeros.

    The result is `[OC/bo/t, outer IC, KH, KW, inner IC, KH, KW, bi, t, bo]`, where the inner axes are a
    chunk's and `t = together` blocks are those of a tile.
    """
    full = filled(weight, in_block, out_block * together)
    _, i, kh, kw = full.shape
    full = full.reshape(
        -1, together, out_block,
        i // in_block // chunk.blocks, chunk.blocks, in_block,
        kh // chunk.rows, chunk.rows, kw // chunk.columns, chunk.columns,
    )  # fmt: skip
    return np.ascontiguousarray(full.transpose(0, 3, 6, 8, 4, 7, 9, 5, 1, 2))


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of float16; its result is float32 unless the sums are those of a single chunk."""
    if not layer.is_in_halves:
        return None
    op, in_block, blocks = layer.op, layer.in_block, layer.out_blocks
    chunk = Chunk.of(-(-layer.numbers.shape[1] // in_block), op.kernel, in_block)
    oc = space(blocks, op.out_width, layer.target, groups=op.groups).oc
    packed = relax.const(pack_weights(layer.numbers, in_block, layer.out_block, oc, chunk))

    def compute(data: te.Tensor, w: te.Tensor) -> te.Tensor:
        return convolve(pad(data, op), w, op, blocks, layer.dtype)

    return emit_kernel(layer.bb, "half_conv2d", compute, layer.x, packed)


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d, out_blocks: int, dtype: str = "float32") -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded; see `emit`."""
    _, ico, kho, kwo, ici, khi, kwi, in_block, together, out_block = (int(d) for d in w.shape)
    per_group = out_blocks // op.groups
    inner = [te.reduce_axis((0, e), n) for e, n in ((ici, "ic"), (khi, "kh"), (kwi, "kw"), (in_block, "ii"))]
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def partial(n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, *rest: tirx.Var) -> tirx.Expr:
        co, ho, wo, v = rest
        ci, hi, wi, ii = inner
        first = 0 if op.groups == 1 else o // per_group * (ico * ici)
        row, column = ho * khi + hi, wo * kwi + wi
        value = x[n, first + co * ici + ci, y * sh + row * dh, z * sw + column * dw, ii]
        return te.sum(value * w[o // together, co, ho, wo, ci, hi, wi, ii, o % together, v], axis=inner)

    shape = (op.batch, out_blocks, op.out_height, op.out_width)
    marks = {SPACE_MARK: KIND, "edge.stride": sw, "edge.dilation": dw}
    if op.groups > 1:
        marks["edge.groups"] = op.groups
    if ico * kho * kwo == 1:  # a single chunk
        zero = tirx.const(0, "int32")
        whole = te.compute(
            (*shape, out_block),
            lambda n, o, y, z, v: partial(n, o, y, z, zero, zero, zero, v),
            name="conv",
            attrs=marks,
        )
        if dtype == "float16":
            return whole
        return te.compute(whole.shape, lambda *i: whole(*i).astype("float32"), name="sums")
    parts = te.compute((*shape, ico, kho, kwo, out_block), partial, name="products")
    outer = [te.reduce_axis((0, e), n) for e, n in ((ico, "co"), (kho, "ho"), (kwo, "wo"))]
    return te.compute(
        (*shape, out_block),
        lambda n, o, y, z, v: te.sum(parts[(n, o, y, z, *outer, v)].astype("float32"), axis=outer),
        name="conv",
        attrs=marks,
    )


@dataclass(frozen=True, slots=True)
class HalfTiles:
    """The decisions of the design space: blocks of output channels, and columns, held in registers."""

    oc: int
    ow: int


def space(out_blocks: int, out_width: int, target: DeviceTarget, groups: int = 1) -> HalfTiles:
    """Return the heuristic's tile: that of the convolution in float32, with vectors of twice the lanes."""
    ocs = tilings(out_blocks, 8) if groups == 1 else divisors(out_blocks // groups, 8)
    choices = TileChoices((out_blocks // groups, out_width), ocs, tilings(out_width, 32))
    return HalfTiles(*best_tile(choices, target, held=multiplies_by_element(target), spare=_SPARE))


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`: the sums of chunks, or the products of a single one."""
    marks = sch.get(block).annotations
    groups = int(marks.get("edge.groups", 1))
    single = str(sch.get(block).writes[0].source.dtype) == "float16"
    products = block if single else sch.get_producers(block)[0]
    padding = sch.get_producers(products)
    data = sch.get(products).reads[0].source.shape
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, *reduction = sch.get_loops(block)
    blocks, height, width = extents_of(sch, (o, y, z))
    tiles = space(blocks, width, target, groups)
    oc = choose("oc", tilings(blocks, 8) if groups == 1 else divisors(blocks // groups, 8), tiles.oc)
    ow = choose("ow", tilings(width, 32), tiles.ow)
    row_bytes = 2 * int(np.prod([int(d) for d in data[1:]])) // height
    at_once = even_part(height, max(1, target.core.l2_bytes // 2 // max(1, row_bytes)))
    oh = choose("oh", tilings(height, height), at_once)
    oo, oi = sch.split(o, [None, oc])
    yo, yi = sch.split(y, [None, oh])
    zo, zi = sch.split(z, [None, ow])
    sch.reorder(n, yo, oo, yi, zo, *reduction, oi, zi, v)
    outer = sch.fuse(n, yo, oo, yi)
    epilogue.place(zo)
    if single:
        (ci, _, wi, ii), io, iz, lane = reduction, oi, zi, v
    else:
        sch.compute_at(products, reduction[-1], preserve_unit_loops=True)
        _, io, _, iz, _, _, _, lane, ci, hi, wi, ii = sch.get_loops(products)[-12:]
        sch.reorder(ci, hi, wi, ii, io, iz, lane)
        unroll_all(sch, oi, zi)
        sch.vectorize(v)
    if multiplies_by_element(target):
        hold_operand(sch, products, wi)
    unroll_all(sch, ii, io, iz)
    sch.vectorize(lane)
    sch.parallel(outer)
    sch.decompose_reduction(products, ci)
    if not single:
        sch.decompose_reduction(block, reduction[0])
    for producer in padding:
        schedule_pad(sch, producer)
