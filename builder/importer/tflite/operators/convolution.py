"""Convolutions: CONV_2D, DEPTHWISE_CONV_2D, TRANSPOSE_CONV, CONV_3D, CONV_3D_TRANSPOSE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import tflite

from builder.errors import RefusalError
from builder.importer.tflite.operation import Operation
from builder.importer.tflite.scope import Layout

_OHWI_TO_OIHW: Final = (0, 3, 1, 2)
_OHWI_TO_IOHW: Final = (3, 0, 1, 2)
_DHWIO_TO_OIDHW: Final = (4, 3, 0, 1, 2)


def same_pads(extent: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    """Padding before and after an axis so that the result has ceil(extent / stride) elements."""
    covered = (kernel - 1) * dilation + 1
    total = max((-(-extent // stride) - 1) * stride + covered - extent, 0)
    return total // 2, total - total // 2


def pads(
    extents: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    padding: int,
) -> list[int]:
    """ONNX's pads for a padding of TFLite: all beginnings, then all ends.

    Raises `RefusalError` if a number is not positive or the padding is unknown.
    """
    if min((*kernel, *strides, *dilations)) < 1:
        raise RefusalError(
            f"expected kernel, strides and dilations of 1 or more, got {kernel}, {strides}, {dilations}"
        )
    if padding == tflite.Padding.VALID:
        return [0] * (2 * len(kernel))
    if padding != tflite.Padding.SAME:
        raise RefusalError(f"expected the padding SAME or VALID, got {padding}")
    both = [same_pads(*one) for one in zip(extents, kernel, strides, dilations, strict=True)]
    return [begin for begin, _ in both] + [end for _, end in both]


def conv_2d(op: Operation) -> None:
    """CONV_2D of x [n, h, w, ci], weight [co, kh, kw, ci / groups] and an optional bias [co]."""
    _convolve(op, op.options("Conv2DOptions"), _OHWI_TO_OIHW, slice(1, 3))


def depthwise_conv_2d(op: Operation) -> None:
    """DEPTHWISE_CONV_2D of x [n, h, w, c], weight [1, kh, kw, c * multiplier] and an optional bias."""
    options = op.options("DepthwiseConv2DOptions")
    _convolve(op, options, _OHWI_TO_IOHW, slice(1, 3), by_channel=True)


def conv_3d(op: Operation) -> None:
    """CONV_3D of x [n, d, h, w, ci], weight [kd, kh, kw, ci, co] and an optional bias [co]."""
    _convolve(op, op.options("Conv3DOptions"), _DHWIO_TO_OIDHW, slice(3))


def _of_axes(options: Any, name: str, rank: int) -> tuple[int, ...]:  # noqa: ANN401 - a table of the schema
    """Return an option of each of the last `rank` axes, such as `Stride`."""
    return tuple(getattr(options, name.format(axis))() for axis in "DHW"[3 - rank :])


def _convolve(
    op: Operation,
    options: Any,  # noqa: ANN401 - a table of the schema
    order: tuple[int, ...],
    window: slice,
    *,
    by_channel: bool = False,
) -> None:
    """Write a convolution whose weight has ONNX's axes in `order`, and its kernel at `window`."""
    filters = op.input(1)
    weight, kernel = op.weight(filters, order), op.scope.shape(filters)[window]
    strides = _of_axes(options, "Stride{}", len(kernel))
    dilations = _of_axes(options, "Dilation{}Factor", len(kernel))
    padding = options.Padding()
    groups = op.shape(0)[-1] if by_channel else None
    x = op.input(0)
    shape = op.scope.shape(x)
    if len(shape) != len(kernel) + 2:
        raise RefusalError(f"expected an input of {len(kernel) + 2} dimensions, got {list(shape)}")
    padded = op.scope.padded.get(x.index)
    if padded is not None and padding == tflite.Padding.VALID and len(kernel) == 2:
        x, border = padded
        pads(shape[1:-1], kernel, strides, dilations, padding)
    else:
        border = pads(shape[1:-1], kernel, strides, dilations, padding)
    if groups is None:
        inputs = op.graph.shape_of(weight)[1]
        if not inputs or shape[-1] % inputs:
            raise RefusalError(f"expected a divisor of {shape[-1]} channels, got {inputs}")
        groups = shape[-1] // inputs
    tensors = [op.scope.real(x, Layout.FIRST), weight]
    if (bias := op.optional(2)) is not None:
        tensors.append(op.bias(bias, op.input(0), op.input(1)))
    result = op.graph.node(
        "Conv",
        *tensors,
        kernel_shape=list(kernel),
        strides=list(strides),
        dilations=list(dilations),
        pads=list(border),
        group=groups,
    )
    op.put_real(op.activate(result, options.FusedActivationFunction()), Layout.FIRST)


def transpose_conv(op: Operation) -> None:
    """TRANSPOSE_CONV of an output shape, weight [co, kh, kw, ci], x [n, h, w, ci] and an optional bias."""
    _transposed(op, op.options("TransposeConvOptions"), _OHWI_TO_IOHW, slice(1, 3))


def conv_3d_transpose(op: Operation) -> None:
    """CONV_3D_TRANSPOSE of an output shape, weight [kd, kh, kw, co, ci], x and an optional bias."""
    options = op.options("Conv3DOptions")
    if set(_of_axes(options, "Dilation{}Factor", 3)) != {1}:
        raise RefusalError("it is dilated")
    _transposed(op, options, _DHWIO_TO_OIDHW, slice(3))


def _transposed(op: Operation, options: Any, order: tuple[int, ...], window: slice) -> None:  # noqa: ANN401
    """Write a transposed convolution; `order` and `window` are as in `_convolve`."""
    filters = op.input(1)
    weight, kernel = op.weight(filters, order), op.scope.shape(filters)[window]
    strides, bias = _of_axes(options, "Stride{}", len(kernel)), op.optional(3)
    wanted = op.integers(0, "output shape")
    shape = op.shape(2)
    if len(wanted) != len(kernel) + 2 or len(shape) != len(wanted) or min((*kernel, *strides)) < 1:
        raise RefusalError(f"expected shapes of {len(kernel) + 2} dimensions, got {list(shape)} and {wanted}")
    begins, ends, extra = [], [], []
    for extent, size, k, stride in zip(shape[1:-1], wanted[1:-1], kernel, strides, strict=True):
        # Only the sizes decide, whatever the padding (reference_ops.h, TransposeConv: as the forward's SAME).
        surplus = (extent - 1) * stride + k - size
        begins.append(max(surplus, 0) // 2)
        ends.append(max(surplus, 0) - max(surplus, 0) // 2)
        extra.append(max(-surplus, 0))
    tensors = [op.real(2, Layout.FIRST), weight]
    if bias is not None:
        tensors.append(op.bias(bias, op.input(2), op.input(1)))
    result = op.graph.node(
        "ConvTranspose",
        *tensors,
        kernel_shape=list(kernel),
        strides=list(strides),
        pads=begins + ends,
        output_padding=extra,
    )
    op.put_real(op.activate(result, options.FusedActivationFunction()), Layout.FIRST)
