"""Where the windows of a pooling are: how many an axis has, and how far they reach beyond the input.

Source: ONNX operator specification, MaxPool-22. Where its text leaves open what happens, as ONNX Runtime:
with VALID, `ceil_mode` counts as without padding, and a window may be larger than the padded input. Padding
for SAME counts dilations, as the specification says; ONNX Runtime forgets them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import onnx

from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.rewrites.convolution import same_padding

# Operators with a window, and the input whose shape says how large it is; None if only an attribute does.
_INPUTS_OF_KERNEL: Final[Mapping[str, int | None]] = {
    "AveragePool": None,
    "LpPool": None,
    "MaxPool": None,
    "Conv": 1,
    "ConvInteger": 1,
    "QLinearConv": 3,
}


@dataclass(frozen=True, slots=True)
class Windows:
    """The windows of a pooling, of each axis.

    `counts`: how many windows there are.
    `begins`, `ends`: the padding before and after the axis, as declared or as `auto_pad` says.
    `reach`: the padding after the axis that the last window needs; not less than `ends`.
    """

    counts: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]
    reach: tuple[int, ...]

    @classmethod
    def of(cls, options: Mapping[str, Any], sizes: Sequence[int], kernel: Sequence[int]) -> Windows:
        """Return the windows of a node.

        With `ceil_mode`, a last window may extend beyond the padding, but one that would begin there is left
        out.

        `sizes`, `kernel`: the extents of the axes, and of the window in them.
        Raises `ValueError` if an axis has no window.
        """
        rank = len(kernel)
        mode = options.get("auto_pad", "NOTSET")
        strides, dilations = (options.get(key, [1] * rank) for key in ("strides", "dilations"))
        begins, ends = [0] * rank, [0] * rank
        if mode == "NOTSET":
            padding = list(options.get("pads", [0] * (2 * rank)))
            begins, ends = padding[:rank], padding[rank:]
        elif mode != "VALID":
            begins, ends = same_padding(options, sizes, kernel)
        ceiled = bool(options.get("ceil_mode", 0)) and mode in ("NOTSET", "VALID")
        counts, reach = [], []
        for size, k, s, d, before, after in zip(sizes, kernel, strides, dilations, begins, ends, strict=True):
            span = (k - 1) * d + 1
            rest = size + before + after - span
            if ceiled:
                count = -(-rest // s) + 1
                count -= (count - 1) * s >= size + before
            else:
                # A window that is larger than the input by less than a stride counts: ONNX Runtime, and the
                # inference of shapes, round the quotient towards zero.
                count = int(rest / s) + 1
            if count < 1:
                raise ValueError(f"expected a window of at most {size + before + after} places, got {span}")
            counts.append(count)
            reach.append(max(after, (count - 1) * s + span - size - before))
        return cls(tuple(counts), tuple(begins), tuple(ends), tuple(reach))


def misfit(node: onnx.NodeProto, graph: OnnxGraph) -> str | None:
    """Return why a convolution's or a pooling's window does not fit its input, in one line.

    Result: None if the window fits each axis, if a shape is unknown, or if the node has no window.
    """
    if node.domain or node.op_type not in _INPUTS_OF_KERNEL:
        return None
    found = graph.type_of(node.input[0])
    shape = None if found is None else found.static_shape
    kernel = _kernel_of(node, graph)
    if shape is None or kernel is None or len(kernel) != len(shape) - 2:
        return None
    options = attributes(node)
    for axis, (size, extent) in enumerate(zip(shape[2:], kernel, strict=True)):
        one: dict[str, Any] = {
            key: [options[key][axis]] for key in ("strides", "dilations") if key in options
        }
        if "pads" in options:
            one["pads"] = [options["pads"][axis], options["pads"][axis + len(kernel)]]
        try:
            Windows.of({**options, **one}, (size,), (extent,))
        except ValueError as error:
            return f"{error} (axis {axis + 2} of '{node.input[0]}', with padding and dilation)"
    return None


def _kernel_of(node: onnx.NodeProto, graph: OnnxGraph) -> Sequence[int] | None:
    """Return the extents of a node's window."""
    place = _INPUTS_OF_KERNEL[node.op_type]
    given: Sequence[int] | None = attributes(node).get("kernel_shape")
    if given or place is None:
        return given
    found = graph.type_of(node.input[place])
    return None if found is None or found.static_shape is None else found.static_shape[2:]
