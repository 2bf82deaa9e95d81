"""Depthwise convolution on packed channels: each channel has its own filter, a block is a vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm import s_tir as st

from builder.kernels.decisions import Chooser, Decision
from builder.kernels.rewriter import shape_of
from builder.kernels.spaces.convolution import Conv2d, divisors, pad
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE, Epilogue
from builder.target.device_target import DeviceTarget

KIND: Final = "depthwise"


def emit(bb: relax.BlockBuilder, op: Conv2d, x: relax.Expr, weight: np.ndarray) -> relax.Expr:
    """The depthwise convolution of packed `x`, as a call of a tensor expression with packed weights."""
    _, blocks, _, _, b = shape_of(x)
    full = np.zeros((blocks * b, *op.kernel), weight.dtype)
    full[: op.in_channels] = weight[:, 0]
    packed = np.ascontiguousarray(full.reshape(blocks, b, *op.kernel).transpose(0, 2, 3, 1))

    def compute(data: te.Tensor, w: te.Tensor) -> te.Tensor:
        return convolve(pad(data, op), w, op)

    call = bb.call_te(
        compute,
        x,
        relax.const(packed),
        primfunc_name_hint="depthwise",
        primfunc_attrs={"op_pattern": FUSES_ELEMENTWISE},
    )
    return bb.emit(call)


def convolve(x: te.Tensor, w: te.Tensor, op: Conv2d) -> te.Tensor:
    """The product itself, over an already padded `x`."""
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
        attrs={"edge.space": KIND},
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """What the design space decides.

    Attributes
    ----------
    ow
        Output columns held in registers.
    oh
        Output rows done together: what they read is padded into a buffer of their own, which stays in the
        second cache, where a padded copy of the whole input would go through memory.
    zeros_first
        Whether what is padded is filled with zeros, and the input copied into it as it lies. With narrow
        vectors that is a third of what it costs to ask for each column what it is; wide ones write too much.
    """

    ow: Decision
    oh: Decision
    zeros_first: bool = False


@dataclass(frozen=True, slots=True)
class Space:
    """The values of each decision, and the heuristic's choice."""

    ow: tuple[int, ...]
    oh: tuple[int, ...]
    default: Tiles


def space(
    out_height: int,
    out_width: int,
    kernel_w: int,
    row_bytes: int,
    target: DeviceTarget,
    stride: int = 1,
) -> Space:
    """Accumulators, what they read and a row of the filter fit the registers; rows a quarter of the cache.

    Parameters
    ----------
    row_bytes
        What the input of one output row takes.
    stride
        Columns of the input for one of the output.
    """
    ows, ohs = divisors(out_width, 32), divisors(out_height, out_height)
    narrow = target.simd.lanes <= 4
    registers = target.simd.registers
    most = max(1, (registers - kernel_w) // (1 + stride) if narrow else (registers - kernel_w - 2) // 2)
    rows = max(1, target.l2_bytes // 4 // row_bytes)
    return Space(ows, ohs, Tiles(max(w for w in ows if w <= most), max(h for h in ohs if h <= rows), narrow))


def apply(sch: st.Schedule, block: st.schedule.SBlockRV, tiles: Tiles) -> None:
    """Order the loops of a depthwise convolution and of what is fused around it."""
    epilogue = Epilogue.after(sch, block)
    n, c, y, z, v, kh, kw = sch.get_loops(block)
    yo, yi = sch.split(y, [None, tiles.oh])
    zo, zi = sch.split(z, [None, tiles.ow])
    sch.reorder(n, c, yo, yi, zo, kh, kw, zi, v)
    outer = sch.fuse(n, c, yo)
    padding = sch.get_producers(block)
    epilogue.place(zo)
    sch.parallel(outer)
    sch.vectorize(v)
    for loop in (zi, kw, kh):
        sch.unroll(loop)
    sch.decompose_reduction(block, kh)
    for producer in padding:
        sch.compute_at(producer, outer, preserve_unit_loops=True)
        if tiles.zeros_first:
            zeros = sch.decompose_padding(producer, sch.get_loops(producer)[1])
            for part in (zeros, producer):
                *_, z, v = sch.get_loops(part)
                _, zi = sch.split(z, [None, max(divisors(int(sch.get(z).extent), 8))])
                sch.unroll(zi)
                sch.vectorize(v)
        else:
            sch.vectorize(sch.get_loops(producer)[-1])


def schedule(sch: st.Schedule, block: st.schedule.SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Apply the decisions that `choose` makes to `block`."""
    extents = [int(sch.get(loop).extent) for loop in sch.get_loops(block)]
    _, _, height, width, lanes, _, kernel_w = extents
    in_width = int(sch.get(block).reads[0].source.shape[3])
    in_rows = int(sch.get(block).reads[0].source.shape[2]) / height
    row_bytes = round(4 * lanes * in_width * in_rows)
    s = space(height, width, kernel_w, row_bytes, target, stride=max(1, in_width // width))
    made = Tiles(choose("ow", s.ow, s.default.ow), choose("oh", s.oh, s.default.oh), s.default.zeros_first)
    apply(sch, block, made)
