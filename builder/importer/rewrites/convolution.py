"""Convolutions and transposed convolutions whose padding follows from the shape of their output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.importer.onnx_graph import copy_node, set_attributes
from builder.importer.rewrites.replacement import Nodes, Replacement


def conv(new: Replacement) -> Nodes | None:
    """Conv or ConvInteger with `auto_pad`: compute the padding, which a kernel then does itself.

    TVM's importer pads by an operator before the convolution, which copies the data.
    """
    options = new.attributes
    if options.get("auto_pad", "NOTSET") not in ("SAME_UPPER", "SAME_LOWER"):
        return None
    shape, weight = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    begins, ends = same_padding(options, shape[2:], weight[2:])
    copy = copy_node(new.node)
    set_attributes(copy, ["auto_pad"], {"pads": begins + ends})
    return [copy]


def same_padding(
    options: Mapping[str, Any], sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the padding before and after each axis of a window with `auto_pad` SAME_UPPER or SAME_LOWER.

    ONNX operator specification, Conv-11 and MaxPool-11: out = ceil(in / stride), so total padding
    = stride (out - 1) + (kernel - 1) dilation + 1 - in. If the total is odd, the larger half is at the end
    for SAME_UPPER, else at the beginning.

    `sizes`, `kernel`: the extents of the axes, and of the window in them.
    """
    strides, dilations = (options.get(key, [1] * len(kernel)) for key in ("strides", "dilations"))
    totals = [
        max(s * (-(-n // s) - 1) + (k - 1) * d + 1 - n, 0)
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
    return (smaller, larger) if options["auto_pad"] == "SAME_UPPER" else (larger, smaller)


def conv_transpose(new: Replacement) -> Nodes | None:
    """ConvTranspose with `output_shape` or `auto_pad`: compute the padding.

    ONNX operator specification, ConvTranspose-11: total padding = stride (in - 1) + output_padding
    + (kernel - 1) dilation + 1 - out. If the total is odd, the larger half is at the beginning, or at the end
    for SAME_UPPER.
    """
    options = new.attributes
    shape, weight = new.shape_of(new.inputs[0]), new.shape_of(new.inputs[1])
    mode = options.get("auto_pad", "NOTSET")
    if "output_shape" not in options and mode in ("NOTSET", "VALID"):
        return None
    rank = len(shape) - 2
    strides = list(options.get("strides", [1] * rank))
    wanted = list(options.get("output_shape", []))[-rank:] or [
        size * stride for size, stride in zip(shape[2:], strides, strict=True)
    ]
    dilations = options.get("dilations", [1] * rank)
    extra = list(options.get("output_padding", [0] * rank))
    begins, ends = [], []
    for axis in range(rank):
        full = strides[axis] * (shape[2 + axis] - 1) + (weight[2 + axis] - 1) * dilations[axis] + 1
        total = full + extra[axis] - wanted[axis]
        if total < 0:
            # The requested output is larger than the convolution's: add zeros at the end. One that `auto_pad`
            # asks for is not, in ONNX Runtime.
            extra[axis] -= total if "output_shape" in options else 0
            total = 0
        small, large = total // 2, total - total // 2
        begins.append(small if mode == "SAME_UPPER" else large)
        ends.append(large if mode == "SAME_UPPER" else small)
    copy = copy_node(new.node)
    set_attributes(copy, ["auto_pad", "output_shape"], {"pads": begins + ends, "output_padding": extra})
    return [copy]
