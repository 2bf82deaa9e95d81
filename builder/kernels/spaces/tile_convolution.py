"""Convolution of small integers on the tiles of a core (AMX), with int32 sums.

Layouts and zero points are those of `integer_convolution`. A row of a tile is a pixel's block of 64 channels,
so its rows are columns of the output, `stride` pixels of the input apart. Weights are packed
`[OC/16, IC/64, KH, KW, 16, 16, 4]`: the reduction reads a panel of 16 output channels in the order in which
it lies in memory, a kilobyte at a time.

A first layer has pixels of four bytes. There a row of a tile is a row of the window: KW adjacent pixels. So
rows of a tile overlap, and need no copy. Weights are packed `[OC/16, 1, KH, 1, KW, 16, 4]`.

Four tiles of sums stay in registers while the reduction runs: of one or more rows and columns of the output,
and of one or two panels. They are stored once, to the L1 cache, from which the epilogue reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser, Decision, Space
from builder.kernels.spaces import prefetch
from builder.kernels.spaces.convolution import filled
from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.geometry import Conv2d, Rows
from builder.kernels.spaces.integer_convolution import order_padding, pack_weights, padding_number
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.loops import extent_of, extents_of, fact
from builder.kernels.spaces.padded_copy import pad
from builder.kernels.spaces.register_tile import divisors, even_part
from builder.kernels.spaces.tile_loops import FEWEST_ROWS, GROUP, MOST_SUMS, STEPS, start_tiles
from builder.target.device_target import DeviceTarget
from builder.target.dot import TILE

KIND: Final = "tile_conv2d"
# With fewer pixels in a row of a tile, dot products are as fast.
FEWEST_PIXELS: Final = 3


def fits(op: Conv2d, in_block: int, dtype: str, target: DeviceTarget) -> bool:
    """Whether tiles are the fastest way to do a convolution of packed channels."""
    rows = min(op.out_width, TILE.rows) * min(op.out_height, MOST_SUMS)
    if not target.dot.tiles or dtype != target.dot.data or rows < FEWEST_ROWS:
        return False
    return in_block == TILE.bytes or (in_block == GROUP >= op.in_channels and _is_row_of_pixels(op))


def _is_row_of_pixels(op: Conv2d) -> bool:
    """Whether a row of the window is a row of a tile, if a pixel is one group."""
    return op.dilation[1] == 1 and FEWEST_PIXELS <= op.kernel[1] <= STEPS


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of bytes without groups; a block of the output is a multiple of 16."""
    op, kind, in_block, out_block = layer.op, layer.data, layer.in_block, layer.out_block
    if not fits(op, in_block, kind, layer.target):
        return None
    full = filled(layer.numbers, in_block, out_block)
    packed = pack_weights(full, in_block, TILE.columns, 1, GROUP)
    panels, in_blocks, kernel_h, kernel_w = packed.shape[:4]
    window = (kernel_h, kernel_w, STEPS) if in_block == TILE.bytes else (kernel_h, 1, kernel_w)
    packed = packed.reshape(panels, in_blocks, *window, TILE.columns, GROUP)
    flat = Flat.of(op) if in_block == TILE.bytes else None

    def compute(data: te.Tensor, w: te.Tensor, value: tirx.Expr) -> te.Tensor:
        if flat is not None:
            return convolve_flat(flat.copy(data, op, value), w, op, flat, out_block)
        return convolve(pad(data, op, value, kind), w, op, out_block)

    number = padding_number(layer, in_block)
    return layer.emit_bytes("integer_conv2d_on_tiles", packed, number, kind, compute)


@dataclass(frozen=True, slots=True)
class Flat:
    """A small image whose pixels are in one row, so that a tile has pixels of several rows of the image.

    Between the rows are the columns that a window needs beside the image: those to the left of a row are
    also those to the right of the row before. Sums are computed for them, too, which nothing reads. An image
    that is read with strides becomes several, its phases: one for each place of a pixel between two steps.

    `columns`: from one row of an image to the next.
    `tiles`: of the sums of all rows, with equally many pixels.
    `phases`: images along rows and columns.
    """

    columns: int
    tiles: int
    phases: tuple[int, int]

    @classmethod
    def of(cls, op: Conv2d) -> Flat | None:
        """Return how a convolution reads an image in one row; None if it takes as many tiles, or too many."""
        before = op.out_height * -(-op.out_width // TILE.rows)
        reach = (op.kernel[1] - 1) * op.dilation[1]
        least = op.out_width + reach // op.strides[1]
        if op.strides[1] == 1:
            least = max(op.out_width, min(least, op.in_width + max(op.padding[1], op.padding[3])))
        choices = []
        for columns in range(least, least + TILE.rows):
            tiles = -(-op.out_height * columns // TILE.rows)
            if tiles <= min(MOST_SUMS, before - 1) and op.out_height * columns % tiles == 0:
                choices.append((tiles, columns))
        if not choices:
            return None
        tiles, columns = min(choices)
        sh, sw = (min(s, (k - 1) * d + 1) for s, k, d in zip(op.strides, op.kernel, op.dilation, strict=True))
        return cls(columns, tiles, (sh, sw))

    def copy(self, x: te.Tensor, op: Conv2d, value: tirx.Expr) -> te.Tensor:
        """Return packed `x` as `[N, C/b, phases, pixels, b]`, with `value` around the image."""
        n, c, h, w, b = (int(d) for d in x.shape)
        top, left, _, _ = op.padding
        (kh, kw), (dh, dw), (sh, sw) = op.kernel, op.dilation, op.strides
        pixels = (op.out_height + (kh - 1) * dh // sh) * self.columns + (kw - 1) * dw // sw

        def element(i: tirx.Var, o: tirx.Var, p: tirx.Var, f: tirx.Var, v: tirx.Var) -> tirx.Expr:
            y = f // self.columns * sh + p // self.phases[1] - top
            z = f % self.columns * sw + p % self.phases[1] - left
            inside = tirx.all(y >= 0, y < h, z >= 0, z < w)
            return tirx.if_then_else(inside, x[i, o, y, z, v], value)

        return te.compute((n, c, self.phases[0] * self.phases[1], pixels, b), element, name="pad")


def convolve_flat(x: te.Tensor, w: te.Tensor, op: Conv2d, flat: Flat, out_block: int) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, an image in one row."""
    (sh, sw), (dh, dw) = op.strides, op.dilation

    def at(y: tirx.Expr, z: tirx.Expr, kh: tirx.Expr, kw: tirx.Expr, iq: tirx.Expr) -> tuple[tirx.Expr, ...]:
        phase = kh * dh % sh * flat.phases[1] + kw * dw % sw
        return phase, (y + kh * dh // sh) * flat.columns + z + kw * dw // sw, iq * GROUP

    sums = _sums(x, w, (op.out_height, flat.columns, out_block), at, {"edge.flat": flat.tiles})
    if flat.columns == op.out_width:
        return sums
    return te.compute((*sums.shape[:3], op.out_width, out_block), sums, name="columns")


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d, out_block: int) -> te.Tensor:
    """Return the tensor expression of the convolution of `x`, which is already padded."""
    (sh, sw), (dh, dw), by_pixels = op.strides, op.dilation, int(x.shape[4]) == GROUP

    def at(y: tirx.Expr, z: tirx.Expr, kh: tirx.Expr, kw: tirx.Expr, iq: tirx.Expr) -> tuple[tirx.Expr, ...]:
        row = y * sh + kh * dh
        return (row, z * sw + iq, 0) if by_pixels else (row, z * sw + kw * dw, iq * GROUP)

    return _sums(x, w, (op.out_height, op.out_width, out_block), at, {})


def _sums(
    x: te.Tensor,
    w: te.Tensor,
    extents: tuple[int, int, int],
    at: Callable[..., tuple[tirx.Expr, ...]],
    attrs: Mapping[str, int],
) -> te.Tensor:
    """Return the sums of `x * w`, `[N, OC/bo, rows, columns, bo]`.

    `extents`: the rows and columns of the result, and `bo`.
    `at`: where a row and a column of the output, a row and a column of the window, and a step of the
        reduction read `x`: its last three indices, the last one that of the first element of a group.
    `attrs`: attributes of the product beside the mark of the design space.
    """
    panels, in_blocks, kernel_h, kernel_w, steps, *_ = (int(d) for d in w.shape)
    parts = extents[2] // TILE.columns
    ic = te.reduce_axis((0, in_blocks), "ic")
    kh = te.reduce_axis((0, kernel_h), "kh")
    kw = te.reduce_axis((0, kernel_w), "kw")
    iq = te.reduce_axis((0, steps), "iq")
    ig = te.reduce_axis((0, GROUP), "ig")

    def element(n: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        *place, first = at(y, z, kh, kw, iq)
        value = x[(n, ic, *place, first + ig)].astype("int32")
        panel, lane = o * parts + v // TILE.columns, v % TILE.columns
        factor = w[panel, ic, kh, kw, iq, lane, ig].astype("int32")
        return te.sum(value * factor, axis=[ic, kh, kw, iq, ig])

    shape = (x.shape[0], panels // parts, *extents)
    return te.compute(shape, element, name="conv", attrs={SPACE_MARK: KIND, **attrs})


@dataclass(frozen=True, slots=True)
class TileShape:
    """The decisions of the design space.

    `m`: output columns in a tile; not a choice.
    `zt`, `yt`, `nt`: tiles along the columns, the rows and the channels of the output, for which sums are in
        registers.
    `oh`: times `yt` output rows are computed for all channels before the next rows. It divides the number of
        such groups of rows, so that only the last group can be incomplete.
    """

    m: int
    zt: Decision
    yt: Decision
    nt: Decision
    oh: Decision


def space(
    height: int, width: int, out_block: int, target: DeviceTarget, rows: Rows, *, by_pixels: bool = False
) -> Space[TileShape]:
    """Return the design space of a convolution on tiles; any choice fits the registers.

    Two panels of weights by two tiles of pixels take the fewest loads. With tiles of at most 8 pixels, a
    panel by four of them does. Tiles whose rows overlap, and cross lines of the cache, take five times as
    long to load as others, so as many panels as possible share one.

    `by_pixels`: whether a row of a tile is a row of the window.
    """
    m, parts = even_part(width, TILE.rows), out_block // TILE.columns
    nt = 2 if parts % 2 == 0 and m > TILE.rows // 2 else 1
    if by_pixels:
        nt = max(divisors(parts, MOST_SUMS))
    most = MOST_SUMS // nt
    # Only whole tiles are side by side; an incomplete one has the registers for itself.
    zts = divisors(width // m, most) if width % m == 0 else (1,)

    def done(zt: int) -> int:
        """Tiles that are computed for `zt` by `most / zt` at once, counting those that are not there."""
        yt = min(most // zt, height)
        return -(-height // yt) * yt * (MOST_SUMS - zt * yt + 1)

    zt = min(zts, key=lambda t: (done(t), -t))
    yts = tuple(t for t in (1, 2, 4) if t * zt <= most and t <= height)
    yt = max(yts)
    nts = divisors(parts, MOST_SUMS // (zt * yt))
    ohs = divisors(-(-height // yt), height)
    oh = max(divisors(-(-height // yt), max(1, rows.at_once(target.core.l2_bytes) // yt)))
    zts = tuple(t for t in zts if t <= zt)
    return Space(TileShape(m, zt, yt, max(nts), oh), {"zt": zts, "yt": yts, "nt": nts, "oh": ohs})


def apply(sch: st.Schedule, block: SBlockRV, tiles: TileShape) -> None:
    """Order the loops of a convolution on tiles, of its padding and of its epilogue."""
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, ic, kh, kw, iq, ig = sch.get_loops(block)
    yo, ym, yt = sch.split(y, [None, tiles.oh, tiles.yt])
    zo, zt, m = sch.split(z, [None, tiles.zt, tiles.m])
    vo, vt, v = sch.split(v, [None, tiles.nt, TILE.columns])
    sch.reorder(n, yo, o, ym, zo, vo, ic, kh, kw, yt, zt, vt, m, iq, v, ig)
    prefetch.mark(sch, kw, rows=tiles.oh)
    outer = sch.fuse(n, yo, o, ym)
    epilogue.place(zo, vector=TILE.columns, unrolled=False)
    sch.parallel(outer)
    start_tiles(sch, block, sums=ic, tiles=(yt, zt, vt), rows=m, vector=v)
    for producer in padding:
        order_padding(sch, producer)


def schedule_flat(sch: st.Schedule, block: SBlockRV, choose: Chooser) -> None:
    """Order the loops of a convolution of an image in one row, whose tiles are all in registers."""
    tiles = int(fact(sch, block, "edge.flat"))
    parts = extent_of(sch, sch.get_loops(block)[4]) // TILE.columns
    nts = divisors(parts, MOST_SUMS // tiles)
    panels = choose("nt", nts, max(nts))
    padding = sch.get_producers(block)
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, ic, kh, kw, iq, ig = sch.get_loops(block)
    zt, m = sch.split(sch.fuse(y, z), [tiles, None])
    vo, vt, v = sch.split(v, [None, panels, TILE.columns])
    sch.reorder(n, o, vo, ic, kh, kw, zt, vt, m, iq, v, ig)
    prefetch.mark(sch, kw, rows=1)
    outer = sch.fuse(n, o)
    epilogue.place(outer, vector=TILE.columns, unrolled=False)
    sch.parallel(outer)
    start_tiles(sch, block, sums=ic, tiles=(zt, vt), rows=m, vector=v)
    for producer in padding:
        order_padding(sch, producer)


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block` by the decisions of `choose`."""
    _, _, height, width, out_block, *_ = extents_of(sch, sch.get_loops(block))
    data = next(r.source for r in sch.get(block).reads if str(r.source.dtype) == target.dot.data)
    if "edge.flat" in sch.get(block).annotations:
        schedule_flat(sch, block, choose)
        return
    by_pixels = int(data.shape[4]) == GROUP
    s = space(height, width, out_block, target, Rows.of(height, data), by_pixels=by_pixels)
    apply(sch, block, s.decide(choose))
