"""Pooling on packed channels: over windows, or over whole planes, rows or columns."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.ir import Call
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import NAN_MARK, SPACE_MARK, Chooser
from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces import rows
from builder.kernels.spaces.epilogue import Epilogue
from builder.kernels.spaces.loops import extent_of
from builder.kernels.spaces.register_tile import tilings
from builder.target.device_target import DeviceTarget

KIND: Final = "pool"
# The most pixels whose bytes, minus their zero point, have a sum that fits into int32.
LARGEST_PLANE: Final = (2**31 - 1) // 255


def _lowest(dtype: str) -> tirx.Expr:
    """Return the identity of a maximum."""
    return tirx.const(-math.inf, dtype) if dtype.startswith("float") else tirx.min_value(dtype)


def emit(bb: relax.BlockBuilder, call: Call, x: relax.Expr) -> relax.Expr | None:
    """Emit a pooling operator on packed `x`, `[N, C/b, H, W, b]`; None if `call` is another operator."""
    name = op_name(call)
    if name in ("relax.nn.max_pool2d", "relax.nn.avg_pool2d"):
        return _window(bb, call, x, is_max=name == "relax.nn.max_pool2d")
    if name == "relax.nn.adaptive_avg_pool2d" and shape_of(call)[2:] == (1, 1):
        return reduction(bb, "relax.mean", x, (2, 3))
    return None


def is_mean_of_planes(call: Call) -> bool:
    """Whether `call` is the mean of each plane of an image."""
    if op_name(call) == "relax.mean":
        axes = sorted(int(a) % 4 for a in call.attrs.axis) if call.attrs.axis is not None else []
        return axes == [2, 3] and bool(call.attrs.keepdims)
    return op_name(call) == "relax.nn.adaptive_avg_pool2d" and shape_of(call)[2:] == (1, 1)


def _window(bb: relax.BlockBuilder, call: Call, x: relax.Expr, *, is_max: bool) -> relax.Expr | None:
    """Emit the maximum or mean of each window, None if the layout is not NCHW."""
    attrs = call.attrs
    if attrs.layout != "NCHW" or attrs.out_layout != "NCHW":
        return None
    n, blocks, height, width, b = shape_of(x)
    _, _, out_h, out_w = shape_of(call)
    kernel_h, kernel_w = (int(k) for k in attrs.pool_size)
    sh, sw = (int(s) for s in attrs.strides)
    dh, dw = (int(d) for d in attrs.dilation)
    top, left, bottom, right = (int(p) for p in attrs.padding)
    counts_padding = bool(attrs.count_include_pad)

    def compute(data: te.Tensor) -> te.Tensor:
        kh = te.reduce_axis((0, kernel_h), "kh")
        kw = te.reduce_axis((0, kernel_w), "kw")
        identity = _lowest(str(data.dtype)) if is_max else tirx.const(0.0, data.dtype)
        # With `ceil_mode` the last window may extend beyond the declared padding.
        need_h = (out_h - 1) * sh + (kernel_h - 1) * dh + 1
        need_w = (out_w - 1) * sw + (kernel_w - 1) * dw + 1
        source = data
        if top or left or need_h > height or need_w > width:
            source = te.compute(
                (n, blocks, max(need_h, height + top), max(need_w, width + left), b),
                lambda i, c, y, z, v: tirx.if_then_else(
                    tirx.all(y >= top, y < height + top, z >= left, z < width + left),
                    data[i, c, y - top, z - left, v],
                    identity,
                ),
                name="pad",
            )
        reducer = te.max if is_max else te.sum
        pooled = te.compute(
            (n, blocks, out_h, out_w, b),
            lambda i, c, y, z, v: reducer(source[i, c, y * sh + kh * dh, z * sw + kw * dw, v], axis=[kh, kw]),
            name="pool",
            attrs={SPACE_MARK: KIND},
        )
        if is_max:
            return pooled

        def count(first: tirx.Expr, kernel: int, dilation: int, extent: tuple[int, int, int]) -> tirx.Expr:
            before, size, after = extent
            # Positions of the window that count: those inside the input, or inside the input and its padding.
            low = tirx.const(0, "int64") if counts_padding else tirx.const(before, "int64")
            high = size + before + (after if counts_padding else 0)
            begin = tirx.max((low - first + dilation - 1) // dilation, 0)
            end = tirx.min((high - first + dilation - 1) // dilation, kernel)
            return tirx.max(end - begin, 1)

        return te.compute(
            (n, blocks, out_h, out_w, b),
            lambda i, c, y, z, v: (
                pooled[i, c, y, z, v]
                / (
                    count(y * sh, kernel_h, dh, (top, height, bottom))
                    * count(z * sw, kernel_w, dw, (left, width, right))
                ).astype(data.dtype)
            ),
            name="mean",
        )

    call = bb.call_te(compute, x, primfunc_name_hint="max_pool2d" if is_max else "avg_pool2d")
    return bb.emit(call)


def reduction(bb: relax.BlockBuilder, name: str, x: relax.Expr, axes: Collection[int]) -> relax.Expr:
    """Emit a reduction of packed `x`, `[N, C/b, H, W, b]`, over rows (axis 2), columns (axis 3) or both.

    `name`: one of `rows.REDUCTIONS`.
    Result: `[N, C/b, H, W, b]`, in which the axes have an extent of 1.
    """
    n, blocks, height, width, b = shape_of(x)
    taps = (height if 2 in axes else 1, width if 3 in axes else 1)
    shape = (n, blocks, height // taps[0], width // taps[1], b)
    reducer, _ = rows.REDUCTIONS[name]

    def compute(data: te.Tensor) -> te.Tensor:
        kh, kw = te.reduce_axis((0, taps[0]), "kh"), te.reduce_axis((0, taps[1]), "kw")
        mark = {SPACE_MARK: KIND, NAN_MARK: 1}
        total = te.compute(
            shape,
            lambda i, c, y, z, v: reducer(data[i, c, y + kh, z + kw, v], axis=[kh, kw]),
            name="pool",
            attrs=mark,
        )
        if name != "relax.mean":
            return total
        share = tirx.const(1.0 / math.prod(taps), data.dtype)
        return te.compute(shape, lambda *i: total(*i) * share, name="mean")

    return bb.emit(bb.call_te(compute, x, primfunc_name_hint=f"{name.removeprefix('relax.')}_of_planes"))


def mean_of_bytes(bb: relax.BlockBuilder, x: relax.Expr, scale: float, zero: int) -> relax.Expr:
    """Emit the mean of each plane of packed bytes that stand for `(x - zero) * scale`, as float32."""
    n, blocks, height, width, b = shape_of(x)
    factor = relax.const(np.float32(scale / (height * width)))
    offset = relax.const(np.int32(-zero * height * width))

    def compute(data: te.Tensor, step: te.Tensor, added: te.Tensor) -> te.Tensor:
        kh = te.reduce_axis((0, height), "kh")
        kw = te.reduce_axis((0, width), "kw")
        total = te.compute(
            (n, blocks, 1, 1, b),
            lambda i, c, _y, _z, v: te.sum(data[i, c, kh, kw, v].astype("int32"), axis=[kh, kw]),
            name="pool",
            attrs={SPACE_MARK: KIND},
        )
        return te.compute(
            (n, blocks, 1, 1, b),
            lambda i, c, y, z, v: (total[i, c, y, z, v] + added()).astype("float32") * step(),
            name="mean",
        )

    return bb.emit(bb.call_te(compute, x, factor, offset, primfunc_name_hint="integer_avg_pool2d"))


def schedule(sch: st.Schedule, block: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: rows are divided among cores, and a tile of columns is kept in registers."""
    del choose
    padding = sch.get_producers(block)
    for producer in padding:
        if sch.get(producer).name_hint == "pad":
            sch.compute_inline(producer)
    epilogue = Epilogue.after(sch, block)
    n, c, y, z, v, kh, kw = sch.get_loops(block)
    width = extent_of(sch, z)
    zo, zi = sch.split(z, [None, max(tilings(width, target.simd.registers // 4))])
    sch.reorder(n, c, y, zo, kh, kw, zi, v)
    outer = sch.fuse(n, c, y)
    epilogue.place(zo)
    sch.parallel(outer)
    sch.vectorize(v)
    sch.unroll(zi)
    sch.decompose_reduction(block, kh)
