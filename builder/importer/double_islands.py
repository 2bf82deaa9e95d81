"""Compute in float32 what a half-precision model computes in float64 between two Casts.

PyTorch's exporter does so for the layer norms of a float16 model up to opset 16. float64 takes twice as long,
and is not recognised as a layer norm. What comes from half precision and returns to it keeps its digits in
float32. Leaves all else that is float64 as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto

from builder.importer.onnx_graph import OnnxGraph, reads, subgraphs

_HALVES: Final = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16})


@dataclass(slots=True)
class _Island:
    """Nodes that share float64 values, and the names of these values.

    `nodes`: positions in the graph.
    `values`: names of the float64 values that nodes make.
    `constants`: names of the float64 weights that they read.
    """

    nodes: set[int] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    constants: set[str] = field(default_factory=set)


def narrow_double_islands(model: onnx.ModelProto) -> int:
    """Replace float64 by float32, in place, where it lies between Casts from and to half precision.

    `model`: the model, with inferred types. The types of values inside it become stale.
    """
    graph = OnnxGraph(model)
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(model.graph.node):
        for name in reads(node):
            readers.setdefault(name, []).append(index)
    makers = {name: index for index, node in enumerate(model.graph.node) for name in node.output if name}
    seen: set[int] = set()
    count = 0
    for index, node in enumerate(model.graph.node):
        if index in seen or not _goes(graph, node, _HALVES, {TensorProto.DOUBLE}):
            continue
        island = _explore(graph, index, readers, makers)
        seen |= island.nodes
        if _is_enclosed(graph, island):
            _narrow(graph, island)
            count += 1
    return count


def _kind(graph: OnnxGraph, name: str) -> int | None:
    found = graph.type_of(name)
    return found.elem_type if found else None


def _goes(
    graph: OnnxGraph, node: onnx.NodeProto, source: frozenset[int] | set[int], to: frozenset[int] | set[int]
) -> bool:
    """Whether a node is a Cast from one of some types to one of others."""
    return (
        node.op_type == "Cast"
        and not node.domain
        and _kind(graph, node.input[0]) in source
        and _kind(graph, node.output[0]) in to
    )


def _explore(graph: OnnxGraph, start: int, readers: dict[str, list[int]], makers: dict[str, int]) -> _Island:
    island = _Island()
    pending = [start]
    while pending:
        index = pending.pop()
        if index in island.nodes:
            continue
        island.nodes.add(index)
        node = graph.proto.node[index]
        for name in (*reads(node), *node.output):
            if _kind(graph, name) != TensorProto.DOUBLE or name in island.values | island.constants:
                continue
            if graph.is_constant(name):
                island.constants.add(name)
                continue
            island.values.add(name)
            pending += readers.get(name, [])
            if name in makers:
                pending.append(makers[name])
    return island


def _is_enclosed(graph: OnnxGraph, island: _Island) -> bool:
    """Whether only Casts from and to half precision lead in and out, and float32 holds its constants."""
    edge = {value.name for value in (*graph.proto.input, *graph.proto.output)}
    if island.values & edge:
        return False
    for name in island.constants:
        value = graph.constant(name)
        if value is None:
            return False
        with np.errstate(over="ignore", under="ignore"):
            narrow = value.astype(np.float32)
        if not np.array_equal(np.isfinite(narrow), np.isfinite(value)) or np.any(
            (narrow == 0) != (value == 0)
        ):
            return False
    double = frozenset({TensorProto.DOUBLE})
    for index in island.nodes:
        node = graph.proto.node[index]
        if _goes(graph, node, _HALVES, double) or _goes(graph, node, double, _HALVES):
            continue
        stays = all(_kind(graph, name) == TensorProto.DOUBLE for name in node.output if name)
        names_type = any(
            a.type == onnx.AttributeProto.INT and a.i == TensorProto.DOUBLE for a in node.attribute
        )
        if node.domain or any(subgraphs(node)) or not stays or node.op_type == "Cast" or names_type:
            return False
    return True


def _narrow(graph: OnnxGraph, island: _Island) -> None:
    names = {}
    for name in sorted(island.constants):
        value = graph.constant(name)
        assert value is not None, "checked by _is_enclosed"
        names[name] = graph.add_constant(value.astype(np.float32), name)
    for index in island.nodes:
        node = graph.proto.node[index]
        node.input[:] = [names.get(name, name) for name in node.input]
        if node.op_type == "Cast" and node.output[0] in island.values:
            for attribute in node.attribute:
                if attribute.name == "to":
                    attribute.i = TensorProto.FLOAT
