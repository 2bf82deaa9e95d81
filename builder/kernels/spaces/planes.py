"""Instance norm on packed channels: a vector holds the same pixel of adjacent channels.

One core normalises a block of planes from start to end: its mean, its variance about the mean, and the
pixels, each a pass over the planes, which a cache still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import shape_of
from builder.kernels.spaces import rows
from builder.kernels.spaces.epilogue import Epilogue, emit_kernel
from builder.target.device_target import DeviceTarget

KIND: Final = "planes"
# Partial sums: an addition takes four cycles, and two begin in each.
_PARTS: Final = (8, 4, 2, 1)


def instance_norm(bb: relax.BlockBuilder, x: relax.Expr, epsilon: float) -> relax.Expr:
    """Emit `(x - mean) / sqrt(variance + epsilon)` of each plane of `x`, `[N, C/b, H, W, b]`."""
    n, blocks, height, width, b = shape_of(x)
    planes = (n, blocks, b)

    def compute(data: te.Tensor) -> te.Tensor:
        share = tirx.const(1.0 / (height * width), "float32")
        total = summed(data, data, "total")
        mean = te.compute(planes, lambda i, c, v: total[i, c, v] * share, name="mean")

        def square(i: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Expr, v: tirx.Var) -> tirx.Expr:
            difference = data[i, c, y, z, v] - mean[i, c, v]
            return difference * difference

        squares = summed(data, square, "squares")
        inverse = te.compute(
            planes,
            lambda i, c, v: tirx.rsqrt(squares[i, c, v] * share + tirx.const(epsilon, "float32")),
            name="inverse",
        )
        return te.compute(
            data.shape,
            lambda i, c, y, z, v: (data[i, c, y, z, v] - mean[i, c, v]) * inverse[i, c, v],
            name="instance_norm",
            attrs={SPACE_MARK: KIND},
        )

    return emit_kernel(bb, "instance_norm", compute, x)


def summed(data: te.Tensor, value: Callable[..., tirx.Expr], name: str) -> te.Tensor:
    """Return the sum of a value over each plane, `[N, C/b, b]`.

    `data`: the image, `[N, C/b, H, W, b]`.
    `value`: what is added, by the indices of an element of `data`.
    """
    n, blocks, height, width, b = (int(d) for d in data.shape)
    parts = next(p for p in _PARTS if width % p == 0)
    y, z = te.reduce_axis((0, height), "y"), te.reduce_axis((0, width // parts), "z")
    k = te.reduce_axis((0, parts), "k")
    partial = te.compute(
        (n, blocks, parts, b),
        lambda i, c, p, v: te.sum(value(i, c, y, z * parts + p, v), axis=[y, z]),
        name=f"partial_{name}",
    )
    return te.compute((n, blocks, b), lambda i, c, v: te.sum(partial[i, c, k, v], axis=k), name=name)


def schedule(sch: st.Schedule, anchor: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops: every stage is computed inside the last block's loop over planes."""
    del choose
    last = Epilogue.after(sch, anchor).block
    sch.compute_inline(anchor)
    stages = [block for block in sch.get_child_blocks(sch.get_sblock("root")) if not _is(sch, block, last)]
    image, block, *_, vector = sch.get_loops(last)
    job = sch.fuse(image, block)
    for stage in reversed(stages):
        sch.compute_at(stage, job, preserve_unit_loops=True)
    sch.parallel(job)
    for stage in stages:
        rows.order_stage(sch, stage, target.simd.lanes)
    sch.vectorize(vector)


def _is(sch: st.Schedule, block: SBlockRV, other: SBlockRV) -> bool:
    return bool(sch.get(block).same_as(sch.get(other)))
