"""Sums over the channels of each pixel: reductions, and layer norm over channels, on packed channels.

A vector holds channels of one pixel. So a sum over channels first adds vectors, for a tile of pixels whose
sums stay in registers, and then the lanes of each vector, in halves. Lanes that only fill the last block are
left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import NAN_MARK, SPACE_MARK, Chooser
from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces import rows
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, Epilogue
from builder.kernels.spaces.loops import extent_of
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "pixels"

Value = Callable[..., tirx.Expr]


def reduction(bb: relax.BlockBuilder, call: Call, x: relax.Expr, channels: int) -> relax.Expr:
    """Emit `call`, one of `rows.REDUCTIONS`, over the channels of `x`, `[N, C/b, H, W, b]`.

    `x`: packed float32, padded only in its last block.
    `channels`: C, without padding.
    Result: `[N, 1, H, W, 1]`.
    """
    n, _, height, width, _ = shape_of(x)
    name = op_name(call)
    reducer, identity = rows.REDUCTIONS[name]

    def compute(data: te.Tensor) -> te.Tensor:
        total = _over_channels(data, data, channels, reducer, identity, "total")

        def element(i: tirx.Var, _c: tirx.Var, y: tirx.Var, z: tirx.Var, _v: tirx.Var) -> tirx.Expr:
            value = total[i, y, z]
            return value * tirx.const(1.0 / channels, "float32") if name == "relax.mean" else value

        return te.compute((n, 1, height, width, 1), element, name="pixels", attrs={SPACE_MARK: KIND})

    hint = f"{name.removeprefix('relax.')}_of_channels"
    return bb.emit(bb.call_te(compute, x, primfunc_name_hint=hint, primfunc_attrs=FUSES_ELEMENTWISE))


def layer_norm(
    bb: relax.BlockBuilder,
    x: relax.Expr,
    channels: int,
    epsilon: float,
    affine: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> relax.Expr:
    """Emit the layer norm over the channels of each pixel of `x`, `[N, C/b, H, W, b]`.

    `x`: packed float32, padded only in its last block.
    `channels`: C, without padding.
    `affine`: a gain and a shift for each channel, `[1, C/b, 1, 1, b]`, or None.
    """
    n, _, height, width, _ = shape_of(x)
    gain, shift = affine
    share = tirx.const(1.0 / channels, "float32")
    pixels = (n, height, width)

    def compute(data: te.Tensor, *numbers: te.Tensor) -> te.Tensor:
        total = _over_channels(data, data, channels, te.sum, 0.0, "total")
        mean = te.compute(pixels, lambda i, y, z: total[i, y, z] * share, name="mean")

        def square(i: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            difference = data[i, c, y, z, v] - mean[i, y, z]
            return difference * difference

        squares = _over_channels(data, square, channels, te.sum, 0.0, "squares")
        inverse = te.compute(
            pixels,
            lambda i, y, z: tirx.rsqrt(squares[i, y, z] * share + tirx.const(epsilon, "float32")),
            name="inverse",
        )

        def element(i: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            rest = list(numbers)
            value = (data[i, c, y, z, v] - mean[i, y, z]) * inverse[i, y, z]
            value = value if gain is None else value * rest.pop(0)[0, c, 0, 0, v]
            return value if shift is None else value + rest.pop(0)[0, c, 0, 0, v]

        return te.compute(data.shape, element, name="pixels", attrs={SPACE_MARK: KIND})

    operands = [x, *(relax.const(each) for each in affine if each is not None)]
    name, attrs = "channel_norm", FUSES_ELEMENTWISE
    return bb.emit(bb.call_te(compute, *operands, primfunc_name_hint=name, primfunc_attrs=attrs))


def _over_channels(
    data: te.Tensor,
    value: Value,
    channels: int,
    reducer: Callable[..., tirx.Expr],
    identity: float,
    name: str,
) -> te.Tensor:
    """Return the reduction of `value` over the channels of each pixel, `[N, H, W]`."""
    n, blocks, height, width, lanes = (int(d) for d in data.shape)
    c = te.reduce_axis((0, blocks), "c")

    def partial(i: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
        own = value(i, c, y, z, v)
        if blocks * lanes > channels:
            own = tirx.Select(c * lanes + v < channels, own, tirx.const(identity, "float32"))
        return reducer(own, axis=c)

    part = te.compute((n, height, width, lanes), partial, name=f"partial_{name}", attrs={NAN_MARK: 1})
    while len(part.shape) > 3:
        part = _halved(part, reducer, name)
    return part


def _halved(part: te.Tensor, reducer: Callable[..., tirx.Expr], name: str) -> te.Tensor:
    """Return half as many partial results of each pixel; the last two become one, `[N, H, W]`."""
    *pixels, lanes = (int(d) for d in part.shape)
    half = lanes // 2
    join = {te.sum: tirx.Add, te.max: tirx.Max, te.min: tirx.Min}[reducer]

    def element(i: tirx.Var, y: tirx.Var, z: tirx.Var, *v: tirx.Var) -> tirx.Expr:
        first = v[0] if v else 0
        return join(part[i, y, z, first], part[i, y, z, first + half])

    shape = (*pixels, half) if half > 1 else tuple(pixels)
    return te.compute(shape, element, name=f"{name}_{half}", attrs={NAN_MARK: 1})


def schedule(sch: st.Schedule, anchor: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: every stage is computed for a tile of pixels, whose sums stay in registers."""
    del choose
    last = Epilogue.after(sch, anchor).block
    sch.compute_inline(anchor)
    others = sch.get_child_blocks(sch.get_sblock("root"))
    stages = [block for block in others if not sch.get(block).same_as(sch.get(last))]
    image, block, row, column, lane = sch.get_loops(last)
    width = extent_of(sch, column)
    tile, pixel = sch.split(column, [None, max(tilings(width, target.simd.registers // 4))])
    sch.reorder(image, row, tile, block, pixel, lane)
    job = sch.fuse(image, row, tile)
    for stage in reversed(stages):
        sch.compute_at(stage, job, preserve_unit_loops=True)
    sch.parallel(job)
    for stage in stages:
        _order_stage(sch, stage)
    sch.unroll(pixel)
    sch.vectorize(lane)


def _order_stage(sch: st.Schedule, block: SBlockRV) -> None:
    """Unroll the pixels of one stage, and vectorise its lanes if it has any."""
    axes = list(sch.get(block).iter_vars)
    loops = sch.get_loops(block)[-len(axes) :]
    reduction = [
        loop for loop, axis in zip(loops, axes, strict=True) if int(axis.iter_type) == tirx.IterVar.CommReduce
    ]
    _, _, pixel, *lanes = [loop for loop in loops if not any(loop.same_as(each) for each in reduction)]
    if reduction:
        sch.reorder(*reduction, pixel, *lanes)
    sch.unroll(pixel)
    if lanes:
        sch.vectorize(lanes[0])
    if reduction:
        sch.decompose_reduction(block, reduction[0])
