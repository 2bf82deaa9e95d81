"""Group norm on packed channels: groups of any number of channels, the whole image among them.

A group may be larger than a block of channels or smaller, so its mean and variance are not those of a loop
over blocks. Three kernels compute them: the moments of each plane, which cores share by blocks of channels;
those of each group, from the few numbers of the first; and the normalised image, to which what follows is
fused. The variance of a group follows exactly from its planes' (Chan, Golub and LeVeque, 1979): no difference
of large numbers, as in the mean of squares less the square of the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tvm import relax, te, tirx
from tvm import s_tir as st
from tvm.s_tir.schedule import SBlockRV

from builder.kernels.decisions import SPACE_MARK, Chooser
from builder.kernels.rewriter import shape_of
from builder.kernels.spaces import planes, rows
from builder.kernels.spaces.epilogue import INJECTIVE, NEVER_FUSED, emit_kernel
from builder.target.device_target import DeviceTarget

KIND: Final = "group_norm"
# Partial sums over the channels of a group: as many as the elements of a vector, if they divide it.
_PARTS: Final = (16, 8, 4, 2, 1)


def group_norm(
    bb: relax.BlockBuilder, x: relax.Expr, channels: int, groups: int, epsilon: float
) -> relax.Expr:
    """Emit `(x - mean) / sqrt(variance + epsilon)` of each group of planes.

    `x`: float32, `[N, C/b, H, W, b]`, padded only in its last block.
    `channels`: C, without padding.
    `groups`: how many groups of adjacent channels there are; it divides `channels`.
    """
    _, _, height, width, _ = shape_of(x)
    moments = emit_kernel(bb, "moments", _moments, x, attrs=NEVER_FUSED)

    def of_groups(own: te.Tensor) -> te.Tensor:
        return _of_groups(own, channels, groups, height * width, epsilon)

    numbers = emit_kernel(bb, "group_moments", of_groups, moments, attrs=NEVER_FUSED)

    def normalised(data: te.Tensor, own: te.Tensor) -> te.Tensor:
        return te.compute(
            data.shape,
            lambda i, c, y, z, v: (data[i, c, y, z, v] - own[i, c, 0, v]) * own[i, c, 1, v],
            name="group_norm",
        )

    return emit_kernel(bb, "group_norm", normalised, x, numbers, attrs=INJECTIVE)


def _moments(data: te.Tensor) -> te.Tensor:
    """Return the mean of each plane, and the sum of squares about it, `[N, C/b, 2, b]`."""
    n, blocks, height, width, lanes = (int(d) for d in data.shape)
    share = tirx.const(1.0 / (height * width), "float32")
    total = planes.summed(data, data, "total")
    mean = te.compute((n, blocks, lanes), lambda i, c, v: total[i, c, v] * share, name="mean")

    def square(i: tirx.Var, c: tirx.Var, y: tirx.Var, z: tirx.Expr, v: tirx.Var) -> tirx.Expr:
        difference = data[i, c, y, z, v] - mean[i, c, v]
        return difference * difference

    squares = planes.summed(data, square, "squares")
    return te.compute(
        (n, blocks, 2, lanes),
        lambda i, c, k, v: tirx.Select(k == 0, mean[i, c, v], squares[i, c, v]),
        name="moments",
        attrs={SPACE_MARK: planes.KIND},
    )


def _of_groups(moments: te.Tensor, channels: int, groups: int, pixels: int, epsilon: float) -> te.Tensor:
    """Return each channel's mean, and the inverse of the deviation, of its group, `[N, C/b, 2, b]`."""
    n, blocks, _, lanes = (int(d) for d in moments.shape)
    size = channels // groups

    parts = next(part for part in _PARTS if size % part == 0)

    def summed(value: Callable[[tirx.Var, tirx.Expr], tirx.Expr], name: str) -> te.Tensor:
        r, k = te.reduce_axis((0, size // parts), "r"), te.reduce_axis((0, parts), "k")
        partial = te.compute(
            (n, groups, parts),
            lambda i, g, p: te.sum(value(i, g * size + r * parts + p), axis=r),
            name=f"partial_{name}",
        )
        return te.compute((n, groups), lambda i, g: te.sum(partial[i, g, k], axis=k), name=name)

    def of_channel(i: tirx.Var, channel: tirx.Expr, which: int) -> tirx.Expr:
        return moments[i, channel // lanes, which, channel % lanes]

    total = summed(lambda i, c: of_channel(i, c, 0), "total")
    mean = te.compute((n, groups), lambda i, g: total[i, g] * tirx.const(1.0 / size, "float32"), name="mean")

    def square(i: tirx.Var, c: tirx.Expr) -> tirx.Expr:
        difference = of_channel(i, c, 0) - mean[i, c // size]
        return of_channel(i, c, 1) + difference * difference * tirx.const(float(pixels), "float32")

    squares = summed(square, "squares")
    share, added = tirx.const(1.0 / (size * pixels), "float32"), tirx.const(epsilon, "float32")
    inverse = te.compute((n, groups), lambda i, g: tirx.rsqrt(squares[i, g] * share + added), name="inverse")

    def element(i: tirx.Var, c: tirx.Var, k: tirx.Var, v: tirx.Var) -> tirx.Expr:
        group = tirx.min((c * lanes + v) // size, groups - 1)  # padding has the numbers of the last group
        return tirx.Select(k == 0, mean[i, group], inverse[i, group])

    return te.compute((n, blocks, 2, lanes), element, name="group_moments", attrs={SPACE_MARK: KIND})


def schedule(sch: st.Schedule, anchor: SBlockRV, target: DeviceTarget, choose: Chooser) -> None:
    """Order the loops of the moments of groups: partial sums are a vector."""
    del choose, anchor
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        if any(int(axis.iter_type) == tirx.IterVar.CommReduce for axis in sch.get(block).iter_vars):
            rows.order_stage(sch, block, target.simd.lanes)
