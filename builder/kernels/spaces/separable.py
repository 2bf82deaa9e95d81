"""A depthwise convolution and the 1x1 convolution of its result, as one kernel.

Apart, each writes a whole picture to memory or to the L2 cache, and the next kernel reads it back. Together
they do one band of rows after another: the depthwise convolution of all channels into a buffer that stays
in the cache, then all output channels of the 1x1 convolution. Bands are divided among cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from tvm import s_tir as st
from tvm import sym
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.spaces import convolution, depthwise, shares
from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.fallback import is_cheap
from builder.kernels.spaces.loops import extent_of, extents_of, unroll_all
from builder.kernels.spaces.register_tile import hold_operand, shorter_inside, tilings, unroll_rounds
from builder.target.device_target import DeviceTarget

KIND: Final = "separable"
# What it costs to copy and pad a row of the input once more, over the time of a row of the output: 0.15 to
# 0.2 where the input is in the L2 cache, more where it is in memory.
_COPYING: Final = 0.25
# The part of a core's L2 cache that a band may fill, so that the next one finds the rows that both read.
_MOST_OF_CACHE: Final = 0.8
# What the borders of bands and their division among cores may cost; beyond, two kernels are faster.
_MOST_COST: Final = 1.5
_BYTES: Final = 4  # of float32
_FIRST: Final = "edge.first"  # marks the depthwise convolution


@dataclass(frozen=True, slots=True)
class Pair:
    """A depthwise convolution, and the 1x1 convolution of its result.

    `batch`, `channels`, `height`, `width`: of what is between the two; channels fill whole blocks.
    `out_channels`: of the 1x1 convolution.
    `in_width`: columns of the depthwise convolution's padded input.
    `stride`, `window`: rows of the input from a row of the output to the next, and that a row of the output
        reads, from the first to the last.
    """

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    in_width: int
    stride: int
    window: int

    @classmethod
    def of(cls, first: st.SBlock, out_channels: int) -> Pair:
        """Return the pair of a depthwise convolution and a 1x1 convolution to `out_channels`."""
        batch, blocks, height, width, lanes = (int(d) for d in first.writes[0].source.shape)
        read = first.reads[0]
        row, tap = first.iter_vars[2], first.iter_vars[5]
        stride, dilation, _ = sym.detect_linear_equation(read.region[2].min, [row.var, tap.var])
        window = (int(tap.dom.extent) - 1) * int(dilation) + 1
        in_width = int(read.source.shape[3])
        return cls(batch, blocks * lanes, height, width, out_channels, in_width, int(stride), window)

    @property
    def _again(self) -> int:
        """Rows of the input that each band reads once more: those under the rest of the window."""
        return max(0, self.window - self.stride)

    def band(self, target: DeviceTarget) -> int:
        """Choose the rows of a band: few, so that all cores get some, but each reads rows once more."""
        options = [rows for rows in tilings(self.height, self.height) if self._fits(rows, target)]
        return min(options, key=lambda rows: (self._cost(rows), -rows), default=1)

    def _fits(self, rows: int, target: DeviceTarget) -> bool:
        return self.band_bytes(rows) <= _MOST_OF_CACHE * target.core.l2_bytes

    def band_bytes(self, rows: int) -> int:
        """Return the bytes that a band of `rows` reads and has between the two convolutions."""
        read = ((rows - 1) * self.stride + self.window) * self.in_width
        return (read + rows * self.width) * self.channels * _BYTES

    def _cost(self, rows: int) -> float:
        """Return the time with bands of `rows`, over that of bands without borders that cores share well."""
        rounds = self.batch * -(-self.height // rows)
        filled = self.height / (rows * -(-self.height // rows))
        return shares.unevenness(rounds) / filled * (1 + _COPYING * self._again / rows)

    def pays(self, target: DeviceTarget) -> bool:
        """Whether one kernel is faster than two.

        Each band reads all weights of the 1x1 convolution: they must be fewer than the numbers that are no
        longer written and read. A band must fit the cache, and there must be enough bands for all cores.
        """
        between = self.batch * self.height * self.width * self.channels * _BYTES
        weights = self.channels * self.out_channels * _BYTES
        rows = self.band(target)
        return weights <= between and self._fits(rows, target) and self._cost(rows) <= _MOST_COST


def mark(sch: st.Schedule, first: SBlockRV, second: SBlockRV) -> None:
    """Make the 1x1 convolution `second` the anchor of a function, and `first` what it reads."""
    geometry = ["x".join(str(int(d)) for d in region.source.shape) for region in sch.get(first).reads]
    sch.unannotate(first, SPACE_MARK)
    sch.annotate(first, _FIRST, 1)
    sch.unannotate(second, SPACE_MARK)
    sch.annotate(second, SPACE_MARK, KIND)
    sch.annotate(second, "edge.depthwise", " ".join(geometry))


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the function around `block`, the 1x1 convolution, by the decisions of `choose`."""
    _, out_blocks, height, width, lanes, _, _, _, in_block = extents_of(sch, sch.get_loops(block))
    first = _first(sch)
    pair = Pair.of(sch.get(first), out_blocks * lanes)
    columns = extent_of(sch, sch.get_loops(first)[-1])
    s = convolution.space(convolution.Sums(out_blocks, width, in_block), target, on_stack=False)
    d = s.default
    pictures, stride = depthwise.Pictures(height, width), max(1, pair.in_width // width)
    dw = depthwise.space(pictures, columns, target, stride)
    tiles = convolution.ConvolutionTiles(
        choose("oc", s.values["oc"], d.oc),
        choose("ow", s.values["ow"], d.ow),
        choose("oh", tilings(height, height), pair.band(target)),
        choose("ii", s.values["ii"], d.ii),
        d.held,
    )
    of_first = depthwise.DepthwiseTiles(
        choose("dw", dw.values["ow"], dw.default.ow), 1, dw.default.zeros_first
    )
    _apply(sch, block, first, tiles, of_first)


def _first(sch: st.Schedule) -> SBlockRV:
    """Return the depthwise convolution of a function that `mark` has marked, without its mark."""
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    (first,) = (block for block in blocks if _FIRST in sch.get(block).annotations)
    sch.unannotate(first, _FIRST)
    return first


def _apply(
    sch: st.Schedule,
    block: SBlockRV,
    first: SBlockRV,
    tiles: convolution.ConvolutionTiles,
    dw: depthwise.DepthwiseTiles,
) -> None:
    """Order the loops of both convolutions, of what is between them, of the padding and of the epilogue."""
    between = _between(sch, first, block)
    padding = sch.get_producers(first)
    epilogue = Epilogue.after(sch, block)
    n, o, y, z, v, ic, kh, kw, ii = sch.get_loops(block)
    oo, oi = sch.split(o, [None, tiles.oc])
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    io, iu = sch.split(ii, [None, tiles.ii])
    tile_loops = (oi, zi) if tiles.held else shorter_inside(sch, oi, zi)
    sch.reorder(n, yo, oo, yi, zo, ic, kh, kw, io, iu, *tile_loops, v)
    band = sch.fuse(n, yo)
    epilogue.place(zo)
    if tiles.held:
        hold_operand(sch, block, io)
        ic = unroll_rounds(sch, ic)
    sch.parallel(band)
    sch.vectorize(v)
    unroll_all(sch, zi, oi, iu)
    sch.decompose_reduction(block, ic)
    sch.compute_at(between, band, preserve_unit_loops=True)
    *_, c, y, z, v = sch.get_loops(between)
    zo, zi = sch.split(z, [None, dw.ow])
    sch.vectorize(v)
    if is_cheap(sch.get(between)):
        sch.unroll(zi)
    sch.compute_at(first, zo, preserve_unit_loops=True)
    *_, z, v, kh, kw = sch.get_loops(first)
    taps = math.prod(extents_of(sch, (kh, kw)))
    sch.reorder(kh, kw, z, v)
    sch.vectorize(v)
    for loop in (z, kw, kh) if taps <= depthwise.MOST_TAPS else (z,):
        sch.unroll(loop)
    sch.decompose_reduction(first, kh)
    for producer in padding:
        depthwise.order_padding(sch, producer, c, zeros_first=dw.zeros_first)


def _between(sch: st.Schedule, first: SBlockRV, second: SBlockRV) -> SBlockRV:
    """Inline what is between the two convolutions into one block, and return it."""
    name = sch.get(first).name_hint
    (last,) = sch.get_producers(second)
    if sch.get(last).name_hint == name:
        return sch.cache_write(first, 0, "global")
    while others := [block for block in sch.get_producers(last) if sch.get(block).name_hint != name]:
        for block in others:
            sch.compute_inline(block)
    return last
