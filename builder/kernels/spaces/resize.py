"""Resizing pictures on packed channels: a vector holds the channels of one pixel.

TVM's expression of the picture's coordinates is kept. It is computed once for each pixel, not for each
channel.
"""

from __future__ import annotations

from typing import Final

from tvm import relax, te, tirx, topi
from tvm.ir import Call

from builder.kernels.rewriter import op_name, shape_of
from builder.kernels.spaces.epilogue import FUSES_ELEMENTWISE

NAME: Final = "relax.image.resize2d"


def emit(bb: relax.BlockBuilder, call: Call, x: relax.Expr) -> relax.Expr | None:
    """Emit a resize of packed `x`, `[N, C/b, H, W, b]`; None if `call` is another operator."""
    if op_name(call) != NAME or call.attrs.layout != "NCHW":
        return None
    attrs, size = call.attrs, shape_of(call)[2:]

    def compute(data: te.Tensor) -> te.Tensor:
        n, blocks, height, width, b = (int(d) for d in data.shape)
        # One block of channels after the other is a batch, in the layout that TVM knows.
        pictures = te.compute(
            (n * blocks, height, width, b),
            lambda i, y, z, v: data[i // blocks, i % blocks, y, z, v],
            name="pictures",
        )
        resized = topi.image.resize2d(
            pictures,
            roi=attrs.roi,
            size=size,
            layout="NHWC",
            method=attrs.method,
            coordinate_transformation_mode=attrs.coordinate_transformation_mode,
            rounding_method=attrs.rounding_method,
            bicubic_alpha=attrs.cubic_alpha,
            bicubic_exclude=attrs.cubic_exclude,
            extrapolation_value=attrs.extrapolation_value,
        )

        def element(i: tirx.Var, o: tirx.Var, y: tirx.Var, z: tirx.Var, v: tirx.Var) -> tirx.Expr:
            return resized[i * blocks + o, y, z, v]

        return te.compute((n, blocks, *size, b), element, name="resize")

    return bb.emit(bb.call_te(compute, x, primfunc_name_hint="resize2d", primfunc_attrs=FUSES_ELEMENTWISE))
