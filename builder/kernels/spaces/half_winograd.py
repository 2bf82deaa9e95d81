"""Winograd's convolution F(m x m, 3 x 3) on packed channels in float16, with sums in float32.

There are three stages, as in `winograd`. ARM uses this algorithm at stride 2, too. Transformed pictures and
weights are rounded to float16, and their products summed as `half_sums` says; the output's transform takes
these sums, in float32.

The points of F(4, 3) are 0, 3/4, -3/4, 3/2 and -3/2: in float16, the transforms for 0, 1, -1, 2 and -2 lose
about 5 dB more. Rows of the input's transform are scaled by powers of two, so that its results are about as
large as its operands; those of the weights are scaled by the inverse. At stride 2, the points are 0 and 1.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import Chooser
from builder.kernels.spaces import winograd
from builder.kernels.spaces.convolution import pack_weights
from builder.kernels.spaces.epilogue import NEVER_FUSED, Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.half_sums import chunk_of
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, unroll_all, vectorise_all
from builder.kernels.spaces.register_tile import (
    TileChoices,
    best_tile,
    hold_operand,
    multiplies_by_element,
    tilings,
)
from builder.kernels.spaces.winograd_loops import order_input, order_output
from builder.kernels.spaces.winograd_stages import Stages, shares_sums
from builder.kernels.spaces.winograd_transforms import Matrix, Transforms
from builder.target.device_target import DeviceTarget

KIND: Final = "half_winograd"
# m, by the stride.
_TILES: Final = {1: 4, 2: 2}
_POINTS: Final = (Fraction(0), Fraction(3, 4), Fraction(-3, 4), Fraction(3, 2), Fraction(-3, 2))


@cache
def transforms(stride: int) -> Transforms:
    """Return the matrices for a stride; at 1, the input's rows have sums of magnitudes of about two."""
    if stride == 2:
        return Transforms.at_stride_2(_TILES[2])
    plain = Transforms.of(_TILES[1], _POINTS)
    factors = [_power_of_two(Fraction(2) / sum(map(abs, row))) for row in plain.input]

    def scaled(matrix: Matrix, by: list[Fraction]) -> Matrix:
        return tuple(tuple(v * f for v in row) for row, f in zip(matrix, by, strict=True))

    inverse = [1 / factor for factor in factors]
    return Transforms(scaled(plain.input, factors), scaled(plain.weights, inverse), plain.output)


def _power_of_two(x: Fraction) -> Fraction:
    exponent = round(np.log2(float(x)))
    return Fraction(1 << exponent) if exponent >= 0 else Fraction(1, 1 << -exponent)


def applies(op: Conv2d, in_block: int, target: DeviceTarget) -> bool:
    """Whether a convolution has 3x3 windows and reads whole vectors; at stride 2, if it pays in float32."""
    plain = (op.kernel, op.dilation, op.groups) == ((3, 3), (1, 1), 1)
    if not plain or in_block != 2 * target.simd.lanes:
        return False
    if op.strides == (2, 2):
        return winograd.output_tile(op, in_block, target) is not None
    return op.strides == (1, 1)


def is_faster_in_floats(op: Conv2d, target: DeviceTarget) -> bool:
    """Whether a first layer of few channels is computed on phases, in float32, with fewer instructions."""
    return op.in_channels < 2 * target.simd.lanes and winograd.output_tile(op, 1, target) is not None


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of float16 as two calls: the transform of the weights, and the convolution.

    What `half_limits` bounds are the sums of whole windows.
    """
    op, target = layer.op, layer.target
    if not (layer.is_in_halves and layer.is_whole and applies(op, layer.in_block, target)):
        return None
    stride = op.strides[0]
    m, g = _TILES[stride], transforms(stride).weights
    oc, beside = space(Stages(op, (m, m), 1).tiles, layer.out_blocks, target)
    packed = relax.const(pack_weights(layer.numbers, layer.in_block, layer.out_block, oc))

    def transform(w: te.Tensor) -> te.Tensor:
        return winograd.transformed(w, g, g, "float16")

    def compute(data: te.Tensor, weights: te.Tensor) -> te.Tensor:
        return convolve(data, weights, op, beside, sharing=shares_sums(target))

    u = emit_kernel(layer.bb, "half_winograd_weights", transform, packed, attrs=NEVER_FUSED)
    return emit_kernel(layer.bb, "half_winograd", compute, layer.x, u)


def convolve(x: te.Tensor, u: te.Tensor, op: Conv2d, beside: int, *, sharing: bool = False) -> te.Tensor:
    """Return the three stages on packed `x` and transformed weights `u`.

    Between the first two stages, the `beside` tiles that the product keeps in registers are adjacent.
    `sharing` is as in `Stages`.
    """
    m = _TILES[op.strides[0]]
    t, stages = transforms(op.strides[0]), Stages(op, (m, m), beside, sharing=sharing)
    in_blocks, bi = int(x.shape[1]), int(x.shape[4])
    _, _, _, _, together, bo = (int(d) for d in u.shape)
    out_blocks = -(-op.out_channels // bo)
    data = stages.data(x, (t.input, t.input), "float16", tirx.const(0, "float16"))
    (inner,) = chunk_of((in_blocks,), bi)
    ic, ii = te.reduce_axis((0, inner), "ic"), te.reduce_axis((0, bi), "ii")

    def partial(xi: tirx.Var, o: tirx.Var, tile: tirx.Var, co: tirx.Var, v: tirx.Var) -> tirx.Expr:
        c = co * inner + ic
        value = data[xi, tile // beside, c, tile % beside, ii]
        return te.sum(value * u[stages.weights_at(xi), o // together, c, ii, o % together, v], axis=[ic, ii])

    shape = (stages.positions, out_blocks, stages.tiles)
    parts = te.compute((*shape, in_blocks // inner, bo), partial, name="products")
    outer = te.reduce_axis((0, in_blocks // inner), "co")
    product = te.compute(
        (*shape, bo),
        lambda xi, o, tile, v: te.sum(parts[xi, o, tile, outer, v].astype("float32"), axis=outer),
        name="product",
    )
    return stages.result(product, (t.output, t.output), KIND)


def space(tiles: int, out_blocks: int, target: DeviceTarget) -> tuple[int, int]:
    """Return the heuristic's register tile: blocks of output channels, and tiles of the picture."""
    choices = TileChoices((out_blocks, tiles), tilings(out_blocks, 8), tilings(tiles, 32))
    return best_tile(choices, target, held=multiplies_by_element(target))


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the three stages and of the epilogue; `block` is the last stage."""
    m, _ = (int(extent) for extent in sch.get(block).annotations["edge.tile"])
    half_out = sch.get_producers(block)[0]
    product = sch.get_producers(half_out)[0]
    products = sch.get_producers(product)[0]
    epilogue = Epilogue.after(sch, block)
    sch.compute_inline(block)
    order_input(sch)

    xi, o, tile, v, co = sch.get_loops(product)
    blocks, tiles = extent_of(sch, o), extent_of(sch, tile)
    best = space(tiles, blocks, target)
    oc = choose("oc", tilings(blocks, 8), best[0])
    beside = choose("tiles", tilings(tiles, 32), best[1])
    to, ti = sch.split(tile, [None, beside])
    oo, oi = sch.split(o, [None, oc])
    sch.reorder(xi, oo, to, co, oi, ti, v)
    sch.compute_at(products, co, preserve_unit_loops=True)
    _, io, it, _, lane, ic, ii = sch.get_loops(products)[-7:]
    sch.reorder(ic, ii, io, it, lane)
    if multiplies_by_element(target):
        hold_operand(sch, products, ic)
    unroll_all(sch, ii, io, it, oi, ti)
    vectorise_all(sch, lane, v)
    sch.parallel(sch.fuse(xi, oo))
    sch.decompose_reduction(products, ic)
    sch.decompose_reduction(product, co)
    order_output(sch, half_out, epilogue, (m, m))


def _growth(stride: int) -> np.ndarray:
    """Return by how much each element of the transformed picture may exceed its largest number."""
    rows = np.array([float(sum(map(abs, row))) for row in transforms(stride).input])
    return np.outer(rows, rows)


def picture_growth(stride: int) -> float:
    """Return by how much the transformed picture may exceed its largest number."""
    return float(_growth(stride).max())


def largest_factors(weight: np.ndarray, stride: int) -> np.ndarray:
    """Return by how much each transformed product may exceed the largest number of the picture.

    `weight`: `[OC, IC, 3, 3]`.
    `stride`: 1 or 2.
    Result: `[OC * (m + 2)**2, IC]` up to the order of rows: the magnitude of a transformed weight, times the
        largest value that the picture's transform makes of numbers up to 1.
    """
    g = np.array([[float(v) for v in row] for row in transforms(stride).weights])
    whole = np.abs(np.einsum("ai,ocij,bj->oabc", g, weight.astype(np.float64), g, optimize=True))
    growth = _growth(stride)[: len(g), : len(g)]  # at stride 2, other positions repeat the last row
    return np.asarray((whole * growth[:, :, None]).reshape(-1, weight.shape[1]))
