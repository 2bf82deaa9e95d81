"""Rewrites convolutions of other kinds as two-dimensional ones, which have design spaces.

A one-dimensional convolution becomes one of images with one row, and so does pooling in one dimension.
Three-dimensional and transposed convolutions become convolutions of images too (`video_convolutions`,
`transposed_convolutions`), and so do depthwise ones with several filters for each channel (`filters`). What
stands between two such convolutions becomes four-dimensional as well (`image_operators`).
"""

from __future__ import annotations

from typing import Final

import tvm
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes import image_operators, transposed_convolutions, video_convolutions
from builder.kernels.passes.filters import several_filters
from builder.kernels.passes.images import SIGNAL, Images
from builder.kernels.rewriter import RESHAPES, in_anf, op_name, rewrite_main, shape_of


def to_conv2d(mod: tvm.IRModule) -> tvm.IRModule:
    """Rewrite the one-dimensional and the transposed convolutions of `mod`.

    Parameters
    ----------
    mod
        A static Relax module whose weights are constants.
    """
    return rewrite_main(in_anf(mod), _emit, Images)


def _emit(table: Images, var: relax.Var, call: Call) -> bool:
    name = op_name(call)
    if name in RESHAPES and call.args[0] in table.images and shape_of(call) == shape_of(call.args[0]):
        table.images[var] = table.images[call.args[0]]
        return True
    if name in image_operators.REDUCTIONS:
        return image_operators.reduction(table, var, call)
    if name == "relax.nn.conv3d":
        return video_convolutions.emit(table, var, call)
    if name in _IMAGES:
        image = _IMAGES[name](table, call)
        if image is not None:
            table.images[var] = table.bb.emit(image)
        return image is not None
    if name in _PLAIN:
        plain = _PLAIN[name](table, call)
        if plain is not None:
            table.define(var, plain)
        return plain is not None
    return False


def _one_dimension(table: Images, call: Call) -> relax.Expr | None:
    """Return a one-dimensional convolution as a two-dimensional one.

    None unless it is NCW, and of float32 or of bytes with int32 sums.
    """
    attrs, dtype = call.attrs, str(call.ty.dtype)
    if attrs.data_layout != "NCW" or attrs.kernel_layout != "OIW" or dtype not in ("float32", "int32"):
        return None
    padding = [int(p) for p in attrs.padding]
    left, right = padding if len(padding) > 1 else padding * 2
    return relax.op.nn.conv2d(
        table.as_image(call.args[0], SIGNAL),
        table.as_image(call.args[1], SIGNAL),
        strides=(1, int(attrs.strides[0])),
        padding=(0, left, 0, right),
        dilation=(1, int(attrs.dilation[0])),
        groups=int(attrs.groups),
        out_dtype=None if dtype == "float32" else dtype,
    )


# Operators that become ones of images `[N, C, 1, W]`, and those that keep their shape.
_IMAGES: Final = {
    "relax.nn.conv1d": _one_dimension,
    "relax.nn.conv1d_transpose": transposed_convolutions.transposed_1d,
    "relax.nn.max_pool1d": image_operators.pooled,
    "relax.nn.avg_pool1d": image_operators.pooled,
    "relax.nn.avg_pool3d": image_operators.pooled_video,
    "relax.nn.max_pool3d": image_operators.pooled_video,
    "relax.nn.prelu": image_operators.slopes,
    "relax.concat": image_operators.moved,
    "relax.nn.pad": image_operators.moved,
    "relax.strided_slice": image_operators.moved,
    **dict.fromkeys(image_operators.ELEMENTWISE, image_operators.elementwise),
}
_PLAIN: Final = {
    "relax.nn.conv2d": several_filters,
    "relax.nn.conv2d_transpose": transposed_convolutions.transposed,
    "relax.nn.conv3d_transpose": transposed_convolutions.transposed,
}
