"""Convolutions whose windows have gaps, by Winograd's algorithm.

With a dilation of d, every d-th row and column of an image is convolved apart from the others. So an image
becomes d*d small ones, which are convolved without gaps, and whose results are interleaved. On small images
their last tiles are hardly filled, and most taps of a window may read padding, which the direct convolution
leaves out (`idle_taps`): `output_tile` compares both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tvm import relax, te, tirx

from builder.kernels.spaces import winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.kernels.spaces.layer import Layer
from builder.kernels.spaces.winograd_stages import Stages, Tile
from builder.target.device_target import DeviceTarget

# In multiply-adds of a vector: what it costs to copy a number once more, as much as to transform it.
_COPY: Final = 8.0
# What this must save: costs are estimates, and two more kernels are started.
_WORTH: Final = 0.9


def without_gaps(op: Conv2d) -> Conv2d:
    """Return the convolution of the small images, which include the padding."""
    (dh, dw), (top, left, bottom, right) = op.dilation, op.padding
    return replace(
        op,
        batch=op.batch * dh * dw,
        in_height=-(-(op.in_height + top + bottom) // dh),
        in_width=-(-(op.in_width + left + right) // dw),
        padding=(0, 0, 0, 0),
        dilation=(1, 1),
    )


def output_tile(op: Conv2d, in_block: int, target: DeviceTarget) -> Tile | None:
    """Choose Winograd's output tile; None if the direct convolution is as fast."""
    if op.dilation == (1, 1) or op.strides != (1, 1):
        return None
    small = without_gaps(op)
    tile = winograd.output_tile(small, in_block, target)
    if tile is None:
        return None
    # A tile of columns is left out only if all of it reads padding.
    read = (1 - op.idle_share(0)) * (1 - op.idle_share(1) / 2)
    numbers = op.batch * op.out_height * op.out_width * (op.in_channels + op.out_channels)
    stages = Stages(small, tile, 1)
    between = stages.positions * stages.tiles * (op.in_channels + op.out_channels)
    l2_numbers = target.core.l2_bytes * target.core.l2_cores // 4
    if target.core.l2_cores > 1 and numbers > l2_numbers // 2:
        return None  # cores that share a cache wait for its memory while images are copied
    spilled = winograd.rows_of_band(small, tile, target) is None and between > l2_numbers // 2
    cost = winograd.cost(small, tile, target) + numbers * _COPY / target.simd.lanes
    cost += 2 * between * winograd.reading(target) if spilled else 0.0
    return tile if cost < _WORTH * winograd.direct_cost(op, target, read) else None


def emit(layer: Layer) -> relax.Expr | None:
    """Emit a convolution of float32 as Winograd's of small images; see `winograd.emit`."""
    bb, op = layer.bb, layer.op
    tile = output_tile(op, layer.in_block, layer.target)
    if tile is None:
        return None
    small = bb.emit(bb.call_te(lambda data: divided(data, op), layer.x, primfunc_name_hint="divided"))
    y = winograd.emit_tiles(replace(layer, op=without_gaps(op), x=small), tile)
    return bb.emit(bb.call_te(lambda data: interleaved(data, op), y, primfunc_name_hint="interleaved"))


def divided(x: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return `[N, C/b, H, W, b]` with its padding as `[N * dh * dw, C/b, ceil, ceil, b]`.

    An image has every `dh`th row and every `dw`th column.
    """
    _, blocks, height, width, block = (int(d) for d in x.shape)
    (dh, dw), (top, left, _, _), small = op.dilation, op.padding, without_gaps(op)

    def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        row, column = y * dh + i // dw % dh - top, z * dw + i % dw - left
        inside = tirx.all(row >= 0, row < height, column >= 0, column < width)
        return tirx.if_then_else(inside, x[i // (dh * dw), o, row, column, v], tirx.const(0, x.dtype))

    return te.compute((small.batch, blocks, small.in_height, small.in_width, block), element, name="divided")


def interleaved(y: te.Tensor, op: Conv2d) -> te.Tensor:
    """Return the results of small images, `[N * dh * dw, OC/bo, ., ., bo]`, as `[N, OC/bo, OH, OW, bo]`."""
    _, blocks, _, _, block = (int(d) for d in y.shape)
    dh, dw = op.dilation

    def element(n: tirx.Var, o: tirx.Var, r: tirx.Var, c: tirx.Var, v: tirx.Var) -> tirx.Expr:
        return y[(n * dh + r % dh) * dw + c % dw, o, r // dh, c // dw, v]

    return te.compute((op.batch, blocks, op.out_height, op.out_width, block), element, name="interleaved")
