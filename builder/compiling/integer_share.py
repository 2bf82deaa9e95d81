"""Which layers of a quantised model are computed with integers, and which in float32.

A layer counts as one of integers if the loops of one of its kernels are those of an integer design space. So
this says what was compiled, not what the model asks for: on a processor on which bytes are no faster, a
depthwise convolution of bytes is computed in float32, though its result is the same. In the same way, it says
whose weights are too large for the fastest loops of a processor without dot products of bytes.
"""

from __future__ import annotations

from typing import Final

from builder.bundles.integer_work import FloatLayer, IntegerWork
from builder.bundles.package import NodeFate
from builder.compiling.block_parity import is_quantised
from builder.compiling.lower import LoweredModule
from builder.importer import ImportedModel
from builder.importer.multiply_adds import multiply_adds_of
from builder.importer.onnx_graph import OnnxGraph
from builder.kernels.schedule import SCHEDULE
from builder.kernels.spaces import (
    dot_loops,
    integer_convolution,
    integer_depthwise,
    integer_matmul,
    integer_winograd,
    tile_convolution,
    tile_matmul,
)

_KINDS: Final = (
    integer_convolution.KIND,
    integer_depthwise.KIND,
    integer_matmul.KIND,
    integer_winograd.KIND,
    tile_convolution.KIND,
    tile_matmul.KIND,
)


def integer_work(
    model: ImportedModel, lowered: LoweredModule, fates: tuple[NodeFate, ...]
) -> IntegerWork | None:
    """Return the work of a quantised model; None if the model is not quantised, or has no such layers.

    `fates`: what became of each node of the model's file, in its order.
    """
    if not is_quantised(model.onnx):
        return None
    whole = {
        var.name_hint
        for var, func in lowered.kernels.functions.items()
        if str(func.attrs.get(SCHEDULE, "")) in _KINDS
    }
    graph = OnnxGraph(model.onnx)
    work: dict[int, int] = {}
    for node in model.onnx.graph.node:
        origin = model.source.origins.get(node.name)
        if origin is not None and fates[origin].fate == "kernel":
            work[origin] = work.get(origin, 0) + multiply_adds_of(node, graph)
    total = sum(work.values())
    floats = [
        FloatLayer(fates[origin].name, fates[origin].operator, count)
        for origin, count in work.items()
        if count and whole.isdisjoint(fates[origin].kernels)
    ]
    floats.sort(key=lambda layer: (-layer.multiply_adds, layer.name))
    kernels = lowered.kernels.functions.items()
    twos = {var.name_hint for var, func in kernels if dot_loops.is_shorter_than_wanted(func)}
    in_twos = sum(count for origin, count in work.items() if not twos.isdisjoint(fates[origin].kernels))
    return IntegerWork(total, tuple(floats), in_twos) if total else None
