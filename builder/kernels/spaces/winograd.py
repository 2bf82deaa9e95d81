"""Winograd's convolution F(m x n, r x s) on packed channels, for 3x3 windows at stride 1.

A tile of `m x n` outputs takes `(m + r - 1) * (n + s - 1)` products instead of `r * m * s * n`: 36 instead of
144 for tiles of 4x4 and windows of 3x3. x86 also uses tiles with other rows than columns. ARM also uses
larger windows, and 3x3 windows at stride 2 (`Transforms.at_stride_2`), which take `(2 m + 1) * (2 n + 1)`: 25
instead of 36 for tiles of 2x2. A first layer of few channels at stride 2 is computed at stride 1 on the
phases of the picture (`phases`).

There are three stages: input tiles are transformed (`B^T d B`), multiplied with transformed weights (one
matrix product for each of these positions), and transformed back (`A^T m A`), with the epilogue.
Each stage does the whole picture; or all three do one band of rows after another, if only then their
intermediate results stay in the L2 cache.

A separate node, which reads only constants, transforms the weights: the executor runs it once, at load, and
the bundle holds the `r * s` numbers of each filter rather than `(m + r - 1) * (n + s - 1)`. At stride 2 as
well, because the positions of the middle tap have their weights in common.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import LoopRV, SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.rewriter import emit_weights
from builder.kernels.spaces import phases, prefetch
from builder.kernels.spaces.convolution import pack_weights, reduction_block
from builder.kernels.spaces.epilogue import NEVER_FUSED, Epilogue, emit_kernel
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of, longer, unroll_all
from builder.kernels.spaces.register_tile import (
    TileChoices,
    best_tile,
    hold_operand,
    multiplies_by_element,
    shorter_inside,
    tilings,
    unroll_rounds,
)
from builder.kernels.spaces.winograd_loops import order_input, order_output
from builder.kernels.spaces.winograd_stages import Stages, Tile, shares_sums
from builder.kernels.spaces.winograd_transforms import Matrix, Transforms, select
from builder.target.device_target import DeviceTarget

KIND: Final = "winograd"
WEIGHTS_KIND: Final = "winograd_weights"
# In multiply-adds of a vector, fitted to a core with 512-bit vectors.
_TRANSFORM_COST: Final = 8.0
_GEMM_COST: Final = 1.1
_WEIGHT_BYTES: Final = 4
# Parts of the L2 cache: what may be between the stages without bands, the transformed weights, and a band.
# Weights may take more of a cache that cores share, because they share the weights, too.
_MOST_BETWEEN: Final = 0.5
_MOST_WEIGHTS, _MOST_SHARED_WEIGHTS = 0.5, 0.6
_MOST_IN_BAND: Final = 0.4
# Vectors of channels in the panel of a usual register tile on ARM.
_PANEL: Final = 3
# Small bands are the fastest, but a band needs as many tiles as the product holds in registers.
_REGISTER_TILES: Final = 12
# Threads share the bands: seven of them keep four threads busy for most of the time.
_FEWEST_BANDS: Final = 7
# Tiles of the output. 5 has 1.5 times the error of 4. Tiles of 5x5 have transforms so long that they only pay
# where multiply-adds are slow.
_TILES: Final[tuple[Tile, ...]] = ((4, 4), (2, 2))
_TILES_ON_ARM: Final[tuple[Tile, ...]] = ((4, 4), (5, 5), (2, 2))
# At stride 2, tiles of 4x4 read 9 x 9 numbers: fewer products, but by estimate 1.6 times the time.
_TILES_AT_STRIDE_2: Final[tuple[Tile, ...]] = ((2, 2),)
# On x86, other tiles are tried where tiles of 4x4 cover more than this times the picture. 14x14 and 7x7,
# which networks have, are covered 1.306 times.
_EXCEEDED: Final = 1.32
_OTHER_TILES: Final[tuple[Tile, ...]] = ((3, 3), (3, 4), (4, 3), (4, 5), (5, 4), (3, 5), (5, 3))
# Windows on ARM, and the largest input tile: one number more has 3 times the error.
_TAPS_ON_ARM: Final = (3, 4, 5)
_LARGEST_TILE: Final = 7
# What a tile with the larger error must save.
_WORTH: Final = 0.95
# By estimate for Raspberry Pi 4 and 5: layers with costs of 0.29, 0.35 and 0.52 take 0.42 to 0.65, 0.59 to
# 1.03 and 0.91 to 1.57 of the time.
_WORTH_OF_LARGER_WINDOWS: Final = 0.4
# On phases, by estimate for the same boards: 64 outputs take 0.59 to 0.95 of the time, 32 outputs 0.87 to
# 1.18.
_MANY_OUTPUTS: Final = 64
# On a Raspberry Pi 3, a row of tiles of a ResNet takes all of a core's part: four cores take 1.15 times as
# long.
_MOST_OF_PART: Final = 0.6


def output_tile(op: Conv2d, in_block: int, target: DeviceTarget) -> Tile | None:
    """Choose the output's tile; None if only the direct convolution applies, or it is as fast.

    Costs are counted in multiply-adds of a vector: the products, the transforms, and reading the weights,
    which in a whole model come from memory each time. So a tile that fits the extents better, but has more
    weights, is only taken where their traffic does not cost more than it saves.
    """
    on_arm = multiplies_by_element(target) and target.simd.registers >= 32
    direct = direct_cost(op, target)
    on_phases = on_arm and in_block == 1 and phases.applies(op, target.simd.lanes)
    if on_phases:
        op, in_block = phases.at_stride_1(op), phases.BLOCK
    if in_block < target.simd.lanes:
        return None
    least, best = direct, None
    for tile in _known_tiles(op, target, on_arm=on_arm):
        if on_phases and not _pays_on_phases(op, tile, target):
            continue
        found = cost(op, tile, target)
        if op.kernel != (3, 3) and not on_phases and found > direct * _WORTH_OF_LARGER_WINDOWS:
            continue
        if found < least * (_WORTH if max(tile) > 4 else 1.0):
            least, best = found, tile
    return best


def _known_tiles(op: Conv2d, target: DeviceTarget, *, on_arm: bool) -> tuple[Tile, ...]:
    """Return the tiles of the output that apply; the preferred one first."""
    height, width = op.kernel
    known = _TAPS_ON_ARM if on_arm else (3,)
    if height != width or height not in known or op.dilation != (1, 1) or op.groups != 1:
        return ()
    if op.strides == (2, 2) and on_arm and height == 3:
        return _TILES_AT_STRIDE_2
    if op.strides != (1, 1):
        return ()
    if height > 3:
        return tuple((m, m) for m in range(_LARGEST_TILE + 1 - height, 1, -1))
    covered = math.prod(-(-extent // 4) * 4 for extent in (op.out_height, op.out_width))
    if target.arch == "x86_64" and covered > _EXCEEDED * op.out_height * op.out_width:
        return (*_TILES, *_OTHER_TILES)
    return _TILES_ON_ARM if on_arm else _TILES


def direct_cost(op: Conv2d, target: DeviceTarget, share: float = 1.0) -> float:
    """Return the cost of the direct convolution, in multiply-adds of a vector.

    `share` is that of the products that it computes: others read padding.
    """
    outputs = op.batch * op.out_height * op.out_width * share
    weights = math.prod(op.kernel) * op.in_channels * op.out_channels
    return outputs * weights / target.simd.lanes + weights * reading(target)


def cost(op: Conv2d, tile: Tile, target: DeviceTarget) -> float:
    """Return the cost of the convolution with a tile, in multiply-adds of a vector."""
    stages = Stages(op, tile, 1)
    i, o = op.in_channels, op.out_channels
    vectors = stages.positions * stages.tiles / target.simd.lanes
    products, transforms = vectors * i * o * _GEMM_COST, vectors * (i + o) * _TRANSFORM_COST
    return products + transforms + stages.weights * i * o * reading(target)


def reading(target: DeviceTarget) -> float:
    """Return the cost of reading a weight from memory, in multiply-adds of a vector."""
    return _WEIGHT_BYTES * target.core.products_per_ns / target.core.memory_bytes_per_ns


def _pays_on_phases(op: Conv2d, tile: Tile, target: DeviceTarget) -> bool:
    """Whether a convolution of phases has enough outputs, and a core's cache has room for its stages.

    The direct convolution of few channels reads little: beyond the cache, it takes a quarter of the time.
    """
    fits = _fits_whole(op, tile, target) or rows_of_band(op, tile, target) is not None
    part = target.core.l2_bytes * _MOST_OF_PART
    return fits and op.out_channels >= _MANY_OUTPUTS and _row_bytes(op, tile, _panel(op, target)) <= part


def _panel(op: Conv2d, target: DeviceTarget) -> int:
    """Return the channels of a band whose products are there at a time: on ARM those of a panel."""
    by_panel = multiplies_by_element(target)
    return min(op.out_channels, _PANEL * target.simd.lanes) if by_panel else op.out_channels


def _row_bytes(op: Conv2d, tile: Tile, out_channels: int) -> int:
    """Return the bytes between the stages for a row of tiles, with some of the output's channels."""
    whole = Stages(op, tile, 1)
    return 4 * whole.positions * (op.in_channels + out_channels) * whole.columns


def _fits_whole(op: Conv2d, tile: Tile, target: DeviceTarget) -> bool:
    """Whether what is between the stages stays in the L2 cache without bands."""
    between = op.batch * Stages(op, tile, 1).rows * _row_bytes(op, tile, op.out_channels)
    return between <= target.core.l2_bytes * target.core.l2_cores * _MOST_BETWEEN


def rows_of_band(op: Conv2d, tile: Tile, target: DeviceTarget) -> int | None:
    """Choose how many rows of tiles go through the three stages together; None for all of them.

    With tiles of 4x4 and windows of 3x3, what is between the stages is 9/4 times as large as the pictures. If
    it does not stay in the L2 cache, a band of it does, beside the weights, which each band reads again. If
    cores share the cache, the whole of it counts and not a core's part, in which the weights would never fit.
    """
    whole = Stages(op, tile, 1)
    l2_bytes = target.core.l2_bytes * target.core.l2_cores
    most_weights = _MOST_WEIGHTS if target.core.l2_cores == 1 else _MOST_SHARED_WEIGHTS
    weight_bytes = _WEIGHT_BYTES * whole.weights * op.in_channels * op.out_channels
    if _fits_whole(op, tile, target) or weight_bytes > l2_bytes * most_weights:
        return None
    row_bytes = _row_bytes(op, tile, _panel(op, target))
    fits = [
        rows
        for rows in range(1, whole.rows)
        if rows * row_bytes <= l2_bytes * _MOST_IN_BAND
        and (op.batch == 1 or whole.rows % rows == 0)
        and op.batch * -(-whole.rows // rows) >= _FEWEST_BANDS
    ]
    return next((rows for rows in fits if rows * whole.columns >= _REGISTER_TILES), max(fits, default=None))


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of float32 weights as two calls; the input may be float16."""
    tile = output_tile(layer.op, layer.in_block, layer.target)
    return None if tile is None else emit_tiles(layer, tile)


def emit_tiles(layer: Layer, tile: Tile) -> relax.Expr:
    """Emit the transform of the weights, and the convolution with a tile of the output.

    A block of the output is a vector of float32, or two of them.
    """
    image, target, weight, op, in_block = layer.op, layer.target, layer.numbers, layer.op, layer.in_block
    if in_block == 1:
        in_block, weight, op = phases.BLOCK, phases.weights_at_stride_1(op, weight), phases.at_stride_1(op)
    # Do not multiply the zeros that fill the last block.
    in_block = reduction_block(in_block, op.in_channels)
    band = rows_of_band(op, tile, target)
    count, block = Stages(op, tile, 1, band).tiles, (in_block, layer.out_block)
    tiles = space(count, layer.out_blocks, block, target).default
    packed = emit_weights(layer.bb, pack_weights(weight, *block, tiles.oc))

    def transform(w: te.Tensor) -> te.Tensor:
        return transform_weights(w, tile, op.strides[0])

    def compute(data: te.Tensor, weights: te.Tensor) -> te.Tensor:
        picture = data if image is op else phases.divide(data, image)
        return convolve(picture, weights, op, tile, tiles.tiles, band, sharing=shares_sums(target))

    u = emit_kernel(layer.bb, "winograd_weights", transform, packed, attrs=NEVER_FUSED)
    return emit_kernel(layer.bb, "winograd", compute, layer.x, u)


def transforms(tile: Tile, stride: int, window: tuple[int, int] = (3, 3)) -> tuple[Transforms, Transforms]:
    """Return the matrices of a tile's rows and of its columns; at stride 2, the window is 3x3."""
    if stride == 2:
        return Transforms.at_stride_2(tile[0]), Transforms.at_stride_2(tile[1])
    return Transforms.of(tile[0], taps=window[0]), Transforms.of(tile[1], taps=window[1])


def transform_weights(w: te.Tensor, tile: Tile, stride: int = 1) -> te.Tensor:
    """Return `G g G^T` of `w` for a tile of the output."""
    rows, columns = transforms(tile, stride, (int(w.shape[2]), int(w.shape[3])))
    return transformed(w, rows.weights, columns.weights)


def transformed(w: te.Tensor, rows: Matrix, columns: Matrix, dtype: str = "float32") -> te.Tensor:
    """Return `rows g columns^T` of `w`, `[OB/t, IB, KH, KW, bi, t, bo]`, rounded to `dtype`.

    Its shape is `[len(rows) * len(columns), OB/t, IB, bi, t, bo]`.
    """
    ob, ib, _, kernel_width, bi, t, bo = (int(d) for d in w.shape)
    high, wide = len(rows), len(columns)
    half = te.compute(
        (ob, ib, high, kernel_width, bi, t, bo),
        lambda o, i, e, kw, a, s, b: select(e, rows, lambda kh: w[o, i, kh, kw, a, s, b]),
        name="half",
    )
    return te.compute(
        (high * wide, ob, ib, bi, t, bo),
        lambda xi, o, i, a, s, b: select(
            xi % wide, columns, lambda kw: half[o, i, xi // wide, kw, a, s, b]
        ).astype(dtype),
        name="weights",
        attrs={SPACE_MARK: WEIGHTS_KIND},
    )


def convolve(
    x: te.Tensor,
    u: te.Tensor,
    op: Conv2d,
    tile: Tile,
    beside: int = 1,
    band: int | None = None,
    *,
    sharing: bool = False,
) -> te.Tensor:
    """Return the three stages on packed `x` and transformed weights `u`.

    Between the first two stages, the `beside` tiles that the product keeps in registers are adjacent.
    `band` and `sharing` are as in `Stages`.
    """
    rows, columns = transforms(tile, op.strides[0], op.kernel)
    stages = Stages(op, tile, beside, band, sharing)
    _, _, in_blocks, bi, together, bo = (int(d) for d in u.shape)
    parts = int(x.shape[4]) // bi  # blocks of the reduction in a block of the input
    data = stages.data(x, (rows.input, columns.input), "float32", tirx.const(0, "float32"))
    ic = te.reduce_axis((0, in_blocks), "ic")
    ii = te.reduce_axis((0, bi), "ii")

    def products(*at: tirx.Var) -> tirx.Expr:
        *q, xi, o, number, v = at
        channel = ii if parts == 1 else ic % parts * bi + ii
        value = data[(*q, xi, number // beside, ic // parts, number % beside, channel)]
        weight = u[stages.weights_at(xi), o // together, ic, ii, o % together, v]
        return te.sum(value * weight, axis=[ic, ii])

    shape = (*stages.bands, stages.positions, -(-op.out_channels // bo), stages.tiles, bo)
    product = te.compute(shape, products, name="product")
    return stages.result(product, (rows.output, columns.output), KIND)


@dataclass(frozen=True, slots=True)
class WinogradTiles:
    """The decisions of the design space, which order the loops of the product.

    `tiles`: input tiles held in registers.
    `oc`: blocks of output channels held in registers.
    `ii`: input channels unrolled in the innermost reduction.
    `held`: whether these input values are held in vector registers; see `register_tile.hold_operand`. In a
        band, the result of `oc` blocks is then complete before the next ones, so that what is between the
        product and the last stage stays in the L1 cache.
    """

    tiles: Decision
    oc: Decision
    ii: Decision
    held: bool = False


def space(tiles: int, out_blocks: int, block: tuple[int, int], target: DeviceTarget) -> Space[WinogradTiles]:
    """Return the design space of the product; the heuristic is that of the direct convolution.

    `tiles`: tiles of the output, of all images.
    `block`: input and output channels in a block.
    """
    in_block, out_block = block
    ts, ocs = tilings(tiles, 32), tilings(out_blocks, 8)
    held = multiplies_by_element(target) and in_block % 4 == 0
    vectors = -(-out_block // target.simd.lanes)  # of a block
    choices = TileChoices((vectors * out_blocks, tiles), tuple(vectors * oc for oc in ocs), ts)
    oc, tile = best_tile(choices, target, held=held)
    oc = max(1, oc // vectors)
    ii = tuple(d for d in (1, 2, 4, 8, 16) if in_block % d == 0)
    return Space(WinogradTiles(tile, oc, min(4, in_block), held), {"tiles": ts, "oc": ocs, "ii": ii})


def apply(sch: st.Schedule, block: SBlockRV, tiles: WinogradTiles, size: Tile) -> None:
    """Order the loops of the three stages and of the epilogue; `block` is the last stage."""
    half_out = sch.get_producers(block)[0]
    product = sch.get_producers(half_out)[0]
    *bands, _, _, tile, _, _, _ = sch.get_loops(product)
    columns = -(-extent_of(sch, sch.get_loops(block)[3]) // size[1])
    band = extent_of(sch, tile) // columns if bands else None
    epilogue = Epilogue.after(sch, block)
    sch.compute_inline(block)
    shared, panel = order_output(sch, half_out, epilogue, size, band, tiles.oc if tiles.held else None)
    if panel is not None:
        sch.compute_at(product, panel, preserve_unit_loops=True)
    divided = sch.get_producers(sch.get_sblock("pad"))
    order_input(sch, None if band is None else shared)
    for stage in divided:
        phases.order(sch, stage)

    xi, o, tile, v, ic, ii = sch.get_loops(product)[-6:]
    to, ti = sch.split(tile, [None, tiles.tiles])
    oo, oi = sch.split(o, [None, tiles.oc])
    io, iu = sch.split(ii, [None, tiles.ii])
    tile_loops = (oi, ti) if tiles.held else shorter_inside(sch, oi, ti)
    sch.reorder(xi, oo, to, ic, io, iu, *tile_loops, v)
    if tiles.held:
        hold_operand(sch, product, io)
        ic = unroll_rounds(sch, ic)
    else:
        prefetch.mark(sch, ic, rows=1)
        _keep_sums_apart(sch, product, to)
    sch.vectorize(v)
    unroll_all(sch, oi, ti, iu)
    if band is None:
        sch.parallel(sch.fuse(xi, oo))
    sch.decompose_reduction(product, ic)


def _keep_sums_apart(sch: st.Schedule, product: SBlockRV, tile: LoopRV) -> None:
    """Let a tile's sums be local until they are complete: beside a prefetch, LLVM would store all others."""
    copy = sch.cache_write(product, 0, "local")
    sch.reverse_compute_at(copy, tile, preserve_unit_loops=True)
    *_, blocks, tiles, vector = sch.get_loops(copy)
    sch.vectorize(vector)
    unroll_all(sch, tiles, blocks)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    high, wide = (int(extent) for extent in sch.get(block).annotations["edge.tile"])
    product = sch.get_sblock("product")
    *_, out_blocks, tiles, out_block, _, in_block = extents_of(sch, sch.get_loops(product))
    s = space(tiles, out_blocks, (in_block, out_block), target)
    apply(sch, block, s.decide(choose), (high, wide))


def schedule_weights(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the transform of weights: blocks of channels are divided among cores."""
    del target, choose
    half = sch.get_producers(block)[0]
    xi, o, i, a, s, b = sch.get_loops(block)
    high = extent_of(sch, sch.get_loops(half)[2])
    e, nu = sch.split(xi, [high, None])
    sch.reorder(o, i, a, s, e, nu, b)
    sch.compute_at(half, s, preserve_unit_loops=True)
    loops = sch.get_loops(half)[4:]
    long = longer(sch, loops)
    unroll_all(sch, *long[:-1], e, nu)
    sch.vectorize(long[-1])
    sch.vectorize(b)
    sch.parallel(sch.fuse(o, i))
