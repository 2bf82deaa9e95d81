"""Poolings of regions, and of windows whose padding follows from `auto_pad` or `ceil_mode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, set_attributes
from builder.importer.rewrites.convolution import same_padding
from builder.importer.rewrites.replacement import Replacement
from builder.importer.rewrites.scatter import max_pool_with_indices


def max_pool(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MaxPool with indices, or with a padding that TVM does not compute."""
    return max_pool_with_indices(node, graph) or pool(node, graph)


def pool(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """MaxPool, AveragePool or LpPool with `auto_pad`, or `ceil_mode` with a window that is left out.

    Before opset 22 ONNX's inference counts such windows. TVM takes no dilated window with `auto_pad`, and
    makes a norm of a mean, which does not count the places beyond the padding that `ceil_mode` adds.
    """
    options, shape = attributes(node), graph.shape_of(node.input[0])
    if shape is None or options.get("auto_pad", "NOTSET") == "VALID":
        return None
    sizes, kernel = shape[2:], options["kernel_shape"]
    new = copy_node(node)
    if options.get("auto_pad", "NOTSET") != "NOTSET":
        begins, ends = same_padding(options, sizes, kernel)
        set_attributes(new, ["auto_pad", "ceil_mode"], {"pads": begins + ends})
        return [new]
    begins, ends, left_out = ceiled_padding(options, sizes, kernel)
    if not options.get("ceil_mode", 0) or (not left_out and node.op_type != "LpPool"):
        return None
    padding = list(options.get("pads", [0] * (2 * len(kernel))))
    if not options.get("count_include_pad", 0) or begins + ends == padding:
        set_attributes(new, ["ceil_mode"], {"pads": begins + ends})
        return [new]
    # A mean counts the padding that is declared, but not that of the last window.
    whole = Replacement(node, graph)
    half = len(kernel)
    padded = whole.op("Pad", node.input[0], whole.ints(0, 0, *padding[:half], 0, 0, *padding[half:]))
    rest = [end - declared for end, declared in zip(ends, padding[half:], strict=True)]
    new.input[0] = padded
    set_attributes(new, ["ceil_mode", "count_include_pad"], {"pads": [0] * half + rest})
    return [*whole.nodes, new]


def roi_align(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[onnx.NodeProto] | None:
    """RoiAlign with `half_pixel` and a scale: scale the regions first.

    ONNX operator specification, RoiAlign-16: half a pixel is subtracted after scaling. TVM does it before.
    """
    options, found = attributes(node), graph.type_of(node.input[1])
    scale = float(options.get("spatial_scale", 1.0))
    if found is None or scale == 1.0:
        return None
    if options.get("coordinate_transformation_mode", "half_pixel") != "half_pixel":
        return None
    whole = Replacement(node, graph)
    new = copy_node(node)
    new.input[1] = whole.op("Mul", node.input[1], whole.constant(scale, found.dtype))
    set_attributes(new, ["spatial_scale"], {})
    return [*whole.nodes, new]


def ceiled_padding(
    options: Mapping[str, Any], sizes: Sequence[int], kernel: Sequence[int]
) -> tuple[list[int], list[int], bool]:
    """Return the padding with which a window without `ceil_mode` gives as many places as one with it.

    ONNX operator specification, MaxPool-22: a window that would begin in the padding at the end is left out.

    Parameters
    ----------
    options
        The node's attributes, without `auto_pad`.
    sizes, kernel
        The extents of the axes, and of the window in them.

    Returns
    -------
    begins, ends
        The padding before and after each axis, not less than the declared one.
    left_out
        Whether there is such a window.
    """
    rank = len(kernel)
    padding = list(options.get("pads", [0] * (2 * rank)))
    strides, dilations = (options.get(key, [1] * rank) for key in ("strides", "dilations"))
    ends, left_out = [], False
    for size, k, s, d, before, after in zip(
        sizes, kernel, strides, dilations, padding[:rank], padding[rank:], strict=True
    ):
        span = (k - 1) * d + 1
        steps = -(-(size + before + after - span) // s)
        if steps * s >= size + before:
            steps -= 1
            left_out = True
        ends.append(max(after, steps * s + span - size - before))
    return padding[:rank], ends, left_out
