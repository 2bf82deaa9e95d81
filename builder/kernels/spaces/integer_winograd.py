"""Winograd's convolution F(m x m, 3 x 3) of bytes on packed channels, exact, for 3x3 windows at stride 1.

As in `winograd`, a tile of `m x m` outputs takes `(m + 2)**2` products instead of `9 * m**2`. Here all three
stages compute with integers. The rows of the weights' transform are multiplied by the smallest numbers that
make them whole, and the output's transform by what makes up for it, so the last stage gives `d**2` times the
sums, d = 24 for m = 4 and 2 for m = 2. Transformed bytes and weights fit 16 bits; they are multiplied in
pairs, or one by one, as 16-bit integers (`builder.target.dot`).

Results are exact though `d**2` times a sum need not fit 32 bits. Sums wrap around, so what is known is
`d**2 * y` modulo 2^32. Its odd factor is divided out by multiplication with its inverse modulo 2^32, and the
power of two `2^k` by a shift. That gives y if `|y| < 2^(31 - k)`, which `is_exact` proves from the weights.

A separate node, which reads only constants, transforms the weights: the executor runs it once, at load, and
the bundle holds nine bytes for each filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.spaces.dot_loops import mark_dot
from builder.kernels.spaces.epilogue import NEVER_FUSED, Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.integer_convolution import pack_weights, start_sums
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extents_of, unroll_all
from builder.kernels.spaces.register_tile import TileChoices, hold_operand, shorter_inside, tilings
from builder.kernels.spaces.winograd_loops import order_input, order_output
from builder.kernels.spaces.winograd_stages import Stages, shares_sums
from builder.kernels.spaces.winograd_transforms import Transforms, WholeTransforms, select, times
from builder.target.device_target import DeviceTarget

KIND: Final = "integer_winograd"
WEIGHTS_KIND: Final = "integer_winograd_weights"
# In products of a vector.
_TRANSFORM_COST: Final = 4.0
_GEMM_COST: Final = 1.1
_INT16: Final = (1 << 15) - 1
_INT32: Final = (1 << 31) - 1


def output_tile(op: Conv2d, weight: np.ndarray, dtype: str, target: DeviceTarget) -> int | None:
    """Choose m, the extent of the output tile; None if only the direct convolution is exact, or as fast.

    `weight`: `[OC, IC, 3, 3]`, int8.
    `dtype`: the input's, `uint8` or `int8`.
    """
    plain = (op.kernel, op.strides, op.dilation, op.groups) == ((3, 3), (1, 1), (1, 1), 1)
    if not plain or not target.dot.word_group or op.in_channels < target.dot.block:
        return None
    words_at_once = target.simd.lanes * target.dot.word_group
    i, o = op.in_channels, op.out_channels
    bytes_per_product = target.core.memory_bytes_per_ns / target.core.products_per_ns
    outputs = op.out_height * op.out_width
    best: tuple[float, int | None] = (
        op.batch * outputs * 9 * i * o / target.dot.at_once + 9 * i * o / bytes_per_product,
        None,
    )
    for m in (4, 2):
        if not is_exact(weight, dtype, m):
            continue
        size = (m + 2) ** 2
        tiles = op.batch * -(-op.out_height // m) * -(-op.out_width // m)
        products = size * tiles * i * o / words_at_once
        transforms = size * tiles * (i + o) / target.simd.lanes * _TRANSFORM_COST
        reading = size * i * o * 2 / bytes_per_product
        best = min(best, (products * _GEMM_COST + transforms + reading, m), key=lambda c: c[0])
    return best[1]


def is_exact(weight: np.ndarray, dtype: str, m: int) -> bool:
    """Whether F(m x m, 3 x 3) of `weight`, `[OC, IC, 3, 3]`, is exact for all inputs of a byte type.

    The transformed inputs and weights must fit 16 bits, their products' sums and the outputs 32 bits, and
    the outputs also after multiplication with the power of two in `d**2`.
    """
    t = Transforms.of(m).whole()
    info = np.iinfo(dtype)
    whole = weight.astype(np.int64)
    rows, g = np.asarray(t.input, np.int64), np.asarray(t.weights, np.int64)
    patterns = np.einsum("ea,fb->efab", rows, rows)
    up, down = (np.maximum(sign * patterns, 0).sum((2, 3)) for sign in (1, -1))
    data = np.maximum(up * int(info.max) - down * int(info.min), down * int(info.max) - up * int(info.min))
    factors = np.einsum("ea,fb,oiab->oief", g, g, whole)
    sums = (np.abs(factors).sum(1) * data).max()
    up, down = (np.maximum(sign * whole, 0).sum((1, 2, 3)) for sign in (1, -1))
    outputs = np.maximum(up * int(info.max) - down * int(info.min), down * int(info.max) - up * int(info.min))
    return bool(
        data.max() <= _INT16
        and np.abs(factors).max() <= _INT16
        and sums <= _INT32
        and int(outputs.max()) << t.shift <= _INT32
    )


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of bytes as two calls: the transform of the weights, and the convolution."""
    op, in_block, out_block, target = layer.op, layer.in_block, layer.out_block, layer.target
    m = output_tile(op, layer.numbers, layer.data, target)
    if m is None:
        return None
    count = op.batch * -(-op.out_height // m) * -(-op.out_width // m)
    tiles = space(count, layer.out_blocks, in_block, out_block, target).default
    packed = relax.const(pack_weights(layer.numbers, in_block, out_block, tiles.oc, target.dot.word_group))

    def transform(w: te.Tensor) -> te.Tensor:
        return transform_weights(w, m)

    def compute(data: te.Tensor, point: te.Tensor, weights: te.Tensor) -> te.Tensor:
        return convolve(data, point, weights, op, m, tiles.tiles, sharing=shares_sums(target))

    u = emit_kernel(layer.bb, "integer_winograd_weights", transform, packed, attrs=NEVER_FUSED)
    return emit_kernel(layer.bb, "integer_winograd", compute, layer.x, layer.zero, u)


def transform_weights(w: te.Tensor, m: int) -> te.Tensor:
    """Return `G' g G'^T` as int16.

    `w`: `[OB/t, IB, 3, 3, bi/g, t, bo, g]`, int8.
    Result: `[(m + 2)**2, OB/t, IB, bi/g, t, bo * g]`.
    """
    size, g = m + 2, Transforms.of(m).whole().weights
    ob, ib, _, _, groups, t, bo, group = (int(d) for d in w.shape)

    def along_columns(*at: tirx.Var) -> tirx.Expr:
        o, i, e, kw, q, s, b = at
        return select(e, g, lambda kh: w[o, i, kh, kw, q, s, b // group, b % group].astype("int16"), "int16")

    half = te.compute((ob, ib, size, 3, groups, t, bo * group), along_columns, name="half")
    return te.compute(
        (size * size, ob, ib, groups, t, bo * group),
        lambda xi, o, i, q, s, b: select(
            xi % size, g, lambda kw: half[o, i, xi // size, kw, q, s, b], "int16"
        ),
        name="weights",
        attrs={SPACE_MARK: WEIGHTS_KIND},
    )


def convolve(
    x: te.Tensor, zero: te.Tensor, u: te.Tensor, op: Conv2d, m: int, beside: int = 1, *, sharing: bool = False
) -> te.Tensor:
    """Return the three stages on packed `x` and transformed weights `u`.

    Between the first two stages, the `beside` tiles that the product keeps in registers are adjacent.
    `sharing` is as in `Stages`.
    """
    t, stages = Transforms.of(m).whole(), Stages(op, (m, m), beside, sharing=sharing)
    in_blocks, bi = int(x.shape[1]), int(x.shape[4])
    _, _, _, steps, together, lanes = (int(d) for d in u.shape)
    group = bi // steps
    bo = lanes // group
    data = stages.data(x, (t.input, t.input), "int16", zero().astype("int16"))
    ic = te.reduce_axis((0, in_blocks), "ic")
    iq = te.reduce_axis((0, steps), "iq")
    ig = te.reduce_axis((0, group), "ig")

    def products(xi: tirx.Var, o: tirx.Var, tile: tirx.Var, v: tirx.Var) -> tirx.Expr:
        value = data[xi, tile // beside, ic, tile % beside, iq * group + ig].astype("int32")
        factor = u[xi, o // together, ic, iq, o % together, v * group + ig].astype("int32")
        return te.sum(value * factor, axis=[ic, iq, ig])

    shape = ((m + 2) ** 2, -(-op.out_channels // bo), stages.tiles, bo)
    product = te.compute(shape, products, name="product")
    return stages.result(product, (t.output, t.output), KIND, lambda multiple: _divided(multiple, t))


def _divided(multiple: tirx.Expr, t: WholeTransforms) -> tirx.Expr:
    """Return a multiple of `d**2`, modulo 2^32, divided by it."""
    if t.inverse != 1:
        multiple = times(multiple, t.inverse)
    return tirx.shift_right(multiple, tirx.const(t.shift, "int32"))


@dataclass(frozen=True, slots=True)
class IntegerWinogradTiles:
    """The decisions of the design space, which order the loops of the product.

    `tiles`: input tiles held in registers.
    `oc`: blocks of output channels held in registers.
    `iq`: groups of input channels unrolled in the innermost reduction.
    """

    tiles: Decision
    oc: Decision
    iq: Decision


def space(
    tiles: int, out_blocks: int, in_block: int, out_block: int, target: DeviceTarget
) -> Space[IntegerWinogradTiles]:
    """Return the design space of the product.

    `tiles`: tiles of the output, of all images.
    """
    ts, ocs = tilings(tiles, 16), tilings(out_blocks, 4)
    registers, held = target.simd.registers, target.dot.held

    def cost(vectors: int, columns: int) -> float | None:
        weights = vectors * -(-out_block // target.simd.lanes)
        if held:
            values = columns * -(-2 * in_block // (4 * target.simd.lanes))  # 16-bit integers, in vectors
            fits = weights * columns + min(weights, 4) + values + 2 <= registers
            return weights + columns / 4 + 1 if fits else None
        return 3 * weights + 2 * columns + 1 if weights * columns <= registers * 3 // 4 else None

    oc, tile = TileChoices((out_blocks, tiles), ocs, ts).least(cost)
    groups = in_block // target.dot.word_group
    iqs = tuple(d for d in (1, 2, 4, 8) if groups % d == 0)
    iq = max(iqs) if held and registers >= 32 else 1
    return Space(IntegerWinogradTiles(tile, oc, iq), {"tiles": ts, "oc": ocs, "iq": iqs})


def apply(
    sch: st.Schedule, block: SBlockRV, tiles: IntegerWinogradTiles, m: int, target: DeviceTarget
) -> None:
    """Order the loops of the three stages and of the epilogue; `block` is the last stage."""
    half_out = sch.get_producers(block)[0]
    product = sch.get_producers(half_out)[0]
    epilogue = Epilogue.after(sch, block)
    sch.compute_inline(block)
    order_input(sch)

    xi, o, tile, v, ic, iq, ig = sch.get_loops(product)
    to, ti = sch.split(tile, [None, tiles.tiles])
    oo, oi = sch.split(o, [None, tiles.oc])
    io, iu = sch.split(iq, [None, tiles.iq])
    held = target.dot.held
    tile_loops = (oi, ti) if held else shorter_inside(sch, oi, ti)
    sch.reorder(xi, oo, to, ic, io, iu, *tile_loops, v, ig)
    if held:
        hold_operand(sch, product, io)
    unroll_all(sch, oi, ti, iu)
    sch.parallel(sch.fuse(xi, oo))
    start_sums(sch, product, ic)
    mark_dot(sch, v)

    order_output(sch, half_out, epilogue, (m, m))


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    m, _ = (int(extent) for extent in sch.get(block).annotations["edge.tile"])
    product = sch.get_sblock("product")
    _, out_blocks, tiles, out_block, _, steps, group = extents_of(sch, sch.get_loops(product))
    s = space(tiles, out_blocks, steps * group, out_block, target)
    apply(sch, block, s.decide(choose), m, target)
