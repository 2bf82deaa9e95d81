"""Poolings of regions, and of windows whose padding follows from `auto_pad` or `ceil_mode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.importer.onnx_graph import copy_node, set_attributes
from builder.importer.rewrites.replacement import Nodes, Replacement
from builder.importer.rewrites.scatter import max_pool_with_indices
from builder.importer.rewrites.windows import Windows


def max_pool(new: Replacement) -> Nodes | None:
    """MaxPool with indices, or with a padding that TVM does not compute."""
    return max_pool_with_indices(new) or pool(new)


def pool(new: Replacement) -> Nodes | None:
    """MaxPool, AveragePool or LpPool whose padding is not what a window needs, or larger than the window.

    Before opset 22 ONNX's inference counts windows that begin in the padding at the end. TVM takes no dilated
    window with `auto_pad`, and makes a norm of a mean, which does not count the places beyond the padding
    that `ceil_mode` adds. ONNX Runtime, the reference, refuses padding that is not smaller than the window,
    which dilated windows may have.
    """
    options, found = new.attributes, new.type_of(new.inputs[0])
    shape = new.shape_of(new.inputs[0])
    kernel = list(options["kernel_shape"])
    windows = Windows.of(options, shape[2:], kernel)
    is_wide = any(
        pad >= k for pad, k in zip((*windows.begins, *windows.reach), [*kernel, *kernel], strict=True)
    )
    plain = options.get("auto_pad", "NOTSET") == "NOTSET" and not options.get("ceil_mode", 0)
    if plain and windows.reach == windows.ends and not is_wide:
        return None
    changed, padding = copy_node(new.node), [*windows.begins, *windows.reach]
    dropped = ["auto_pad", "ceil_mode"]
    # A mean that counts padding does not count what the last window needs beyond it.
    counts_padding = bool(options.get("count_include_pad", 0)) and new.node.op_type == "AveragePool"
    counts_less = counts_padding and windows.reach != windows.ends
    if not is_wide and not counts_less:
        set_attributes(changed, dropped, {"pads": padding})
        return [changed]
    declared = [*windows.begins, *windows.ends] if counts_less else padding
    half = len(kernel)
    fill = () if new.node.op_type != "MaxPool" else (new.constant(_lowest(found.dtype), found.dtype),)
    widths = new.ints(0, 0, *declared[:half], 0, 0, *declared[half:])
    changed.input[0] = new.op("Pad", new.inputs[0], widths, *fill)
    if not is_wide:
        rest = [each - end for each, end in zip(windows.reach, windows.ends, strict=True)]
        set_attributes(changed, [*dropped, "count_include_pad"], {"pads": [0] * half + rest})
        return [*new.nodes, changed]
    if counts_less:
        beyond = [each - end for each, end in zip(windows.reach, windows.ends, strict=True)]
        widths = new.ints(0, 0, *[0] * half, 0, 0, *beyond)
        changed.input[0] = new.op("Pad", changed.input[0], widths)
    set_attributes(changed, [*dropped, "pads", "count_include_pad"], {})
    if new.node.op_type != "AveragePool" or (counts_padding and not counts_less):
        return [*new.nodes, changed]
    counted = _counted(options, shape[2:], windows, counts_padding=counts_padding)
    mean = new.graph.fresh(f"{new.node.name}/mean")
    changed.output[0] = mean
    factor = new.constant(np.prod(kernel) / np.maximum(counted, 1), found.dtype)
    before = list(new.nodes)
    new.op("Mul", mean, factor, to=new.outputs[0])
    return [*before, changed, new.nodes[-1]]


def _lowest(dtype: np.dtype[Any]) -> float | int:
    """Return what is never larger than another number."""
    return -np.inf if dtype.kind == "f" else int(np.iinfo(dtype).min)


def _counted(
    options: Mapping[str, Any], sizes: Sequence[int], windows: Windows, *, counts_padding: bool
) -> NDArray[np.float64]:
    """Return how many places of each window a mean counts, `[1, 1, *counts]`."""
    kernel = options["kernel_shape"]
    rank = len(kernel)
    strides, dilations = (options.get(key, [1] * rank) for key in ("strides", "dilations"))
    total = np.ones((1, 1, *[1] * rank))
    for axis, size in enumerate(sizes):
        low = -windows.begins[axis] if counts_padding else 0
        high = size + (windows.ends[axis] if counts_padding else 0)
        first = np.arange(windows.counts[axis]) * strides[axis] - windows.begins[axis]
        places = first[:, None] + np.arange(kernel[axis]) * dilations[axis]
        form = [1] * (rank + 2)
        form[2 + axis] = -1
        total = total * ((places >= low) & (places < high)).sum(axis=1).reshape(form)
    return np.asarray(total, np.float64)


def roi_align(new: Replacement) -> Nodes | None:
    """RoiAlign with `half_pixel` and a scale: scale the regions first.

    ONNX operator specification, RoiAlign-16: half a pixel is subtracted after scaling. TVM does it before.
    """
    options, found = new.attributes, new.type_of(new.inputs[1])
    scale = float(options.get("spatial_scale", 1.0))
    if scale == 1.0:
        return None
    if options.get("coordinate_transformation_mode", "half_pixel") != "half_pixel":
        return None
    changed = copy_node(new.node)
    changed.input[1] = new.op("Mul", new.inputs[1], new.constant(scale, found.dtype))
    set_attributes(changed, ["spatial_scale"], {})
    return [*new.nodes, changed]
