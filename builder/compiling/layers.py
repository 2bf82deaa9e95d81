"""What became of each node of the model: which kernels compute it, or why none does.

The other way round, it says for each call of a kernel which nodes it computes, with their shapes as in the
model. A node without a kernel of its own was folded, merged into the nodes that read it, or needs no work:
its computation can only have moved towards the outputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import onnx
from tvm import relax
from tvm.ir import Call

from agent.bundle.layer import Layer
from builder.bundles.package import Fate, NodeFate
from builder.calls.spans import names_of
from builder.importer import ImportedModel
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.importer.source_nodes import SourceNode
from builder.kernels.rewriter import op_name

# Kernels that only move data between layouts, for the sake of the next kernel.
_COPIES: Final = re.compile(r"(pack|unpack|channels)\d*")
# Operators that a copy computes if their nodes have no kernel of their own.
_MOVERS: Final = frozenset(
    {"Concat", "DepthToSpace", "Expand", "Gather", "Pad", "Slice", "SpaceToDepth", "Split", "Transpose"}
)
# Operators whose result is their input under another name or in another shape.
_FREE: Final = frozenset({"Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
# Their subgraphs were inlined: a node in them is named `NODE/INNER`, in a loop `NODE/STEP/INNER`.
_CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
_WINDOWED: Final = frozenset(
    {"AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv"}
)


@dataclass(frozen=True, slots=True)
class _KernelCall:
    """A call of a kernel: the variable of its result, its kernel, and the nodes in its span."""

    var: relax.Var
    kernel: str
    nodes: tuple[str, ...]

    @property
    def is_copy(self) -> bool:
        return _COPIES.fullmatch(self.kernel) is not None


class Layers:
    """The nodes behind each call of a lowered model.

    `main`: what `builder.compiling.lower` made of it.
    """

    def __init__(self, model: ImportedModel, main: relax.Function) -> None:
        self._model = model
        self._source = model.source
        self._calls = [
            _KernelCall(binding.var, str(binding.value.args[0].name_hint), names_of(binding.value))
            for block in main.body.blocks
            for binding in block.bindings
            if isinstance(binding.value, Call) and op_name(binding.value) == "relax.call_tir"
        ]
        # Index of an original node -> indices of the calls that compute it.
        self._own: dict[int, list[int]] = {}
        for number, call in enumerate(self._calls):
            for origin in {self._source.origins.get(name) for name in call.nodes}:
                if origin is not None:
                    self._own.setdefault(origin, []).append(number)

    @cached_property
    def by_call(self) -> Mapping[relax.Var, Layer]:
        """Variable of a call's result -> the layer that the call computes."""
        graph = OnnxGraph(self._model.onnx)
        nodes = {node.name: node for node in self._model.onnx.graph.node}
        order = {name: index for index, name in enumerate(nodes)}
        readers = Counter(name for node in nodes.values() for name in node.input)
        readers.update(value.name for value in graph.proto.output)
        made_of: dict[int, list[str]] = {}
        for name, origin in self._source.origins.items():
            made_of.setdefault(origin, []).append(name)
        found = {}
        for number, call in enumerate(self._calls):
            computed = sorted(self._origins[number])
            labels = [label for i in computed for label in self._labels(i, call, nodes)]
            merged = [i for i in computed if i in self._merged]
            names = {*call.nodes, *(name for i in merged for name in made_of.get(i, ()))}
            members = [nodes[name] for name in sorted(names & nodes.keys(), key=order.__getitem__)]
            if call.is_copy or not members:
                found[call.var] = Layer.of(labels)
                continue
            reads, writes = _shapes(members, graph, readers)
            found[call.var] = Layer.of(labels, _window(members, graph), reads, writes)
        return found

    def _labels(
        self, origin: int, call: _KernelCall, nodes: Mapping[str, onnx.NodeProto]
    ) -> list[tuple[str, str]]:
        """Return operator and name of an original node, or of those in its subgraphs that a call computes."""
        node = self._source.nodes[origin]
        if node.op not in _CONTROL_FLOW:
            return [(node.op, node.name)]
        inner = {
            name.removeprefix(f"{node.name}/"): nodes[name].op_type
            for name in call.nodes
            if self._source.origins.get(name) == origin and name.startswith(f"{node.name}/") and name in nodes
        }
        return [(op, name) for name, op in inner.items()]

    @cached_property
    def fates(self) -> tuple[NodeFate, ...]:
        """What became of each node, in the model's order."""
        return tuple(self._fate(index, node) for index, node in enumerate(self._source.nodes))

    def _fate(self, index: int, node: SourceNode) -> NodeFate:
        calls = self._own.get(index) or self._merged.get(index)
        if not calls:
            fate: Fate = "folded" if index in self._constant else "no work"
            return NodeFate(node.name, node.op, fate if index in self._used else "unused")
        kernels = tuple(dict.fromkeys(self._calls[number].kernel for number in calls))
        others = sorted({i for number in calls for i in self._origins[number]} - {index})
        return NodeFate(
            node.name, node.op, "kernel", kernels, tuple(self._source.nodes[i].name for i in others)
        )

    @cached_property
    def _origins(self) -> Sequence[frozenset[int]]:
        """For each call, the nodes that it computes."""
        found: list[set[int]] = [set() for _ in self._calls]
        for nodes in (self._own, self._merged):
            for index, calls in nodes.items():
                for number in calls:
                    found[number].add(index)
        return [frozenset(each) for each in found]

    @cached_property
    def _constant(self) -> frozenset[int]:
        """The nodes whose results depend on no input's values."""
        varying = {spec.name for spec in self._model.inputs}
        constant = set()
        for index, node in enumerate(self._source.nodes):
            if node.op in ("Shape", "Size") or varying.isdisjoint(node.reads):
                constant.add(index)
            else:
                varying.update(node.writes)
        return frozenset(constant)

    @cached_property
    def _used(self) -> frozenset[int]:
        """The nodes on which an output depends."""
        needed, used = set(self._source.outputs), set()
        for index in reversed(range(len(self._source.nodes))):
            node = self._source.nodes[index]
            if not needed.isdisjoint(node.writes):
                used.add(index)
                needed |= node.reads
        return frozenset(used)

    @cached_property
    def _merged(self) -> Mapping[int, Sequence[int]]:
        """Node without kernels of its own -> the calls that compute it for the nodes that read it."""
        readers_of = self._source.readers()
        nearest: dict[int, tuple[int, ...]] = {}
        found = {}
        for index in reversed(range(len(self._source.nodes))):
            node = self._source.nodes[index]
            if index in self._own:
                nearest[index] = (index,)
                continue
            readers = [r for name in node.writes for r in readers_of.get(name, ()) if r > index]
            nearest[index] = tuple(dict.fromkeys(t for r in readers for t in nearest.get(r, ())))
            if node.op in _FREE or index in self._constant or not nearest[index]:
                continue
            calls = [number for target in nearest[index] for number in self._own[target]]
            fitting = [n for n in calls if self._calls[n].is_copy == (node.op in _MOVERS)]
            found[index] = sorted(set(fitting or calls))
        return found


def _shapes(
    members: Sequence[onnx.NodeProto], graph: OnnxGraph, readers: Counter[str]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of what nodes read from others and of what others read from them.

    `readers` counts how often each value is read; an output of the model is read once more.
    """
    made = {name for node in members for name in node.output if name}
    read = dict.fromkeys(name for node in members for name in node.input if name and name not in made)
    inside = Counter(name for node in members for name in node.input)
    wanted = {name for name in made if readers[name] > inside[name]}
    inputs = [graph.shape_of(name) for name in read if not graph.is_constant(name)]
    outputs = [graph.shape_of(name) for node in members for name in node.output if name in wanted]
    return [s for s in inputs if s is not None], [s for s in outputs if s is not None]


def _window(members: Sequence[onnx.NodeProto], graph: OnnxGraph) -> str:
    """Return kernel size, strides, groups and dilation of the first convolution or pooling, "" if none."""
    node = next((node for node in members if node.op_type in _WINDOWED), None)
    if node is None:
        return ""
    given = attributes(node)
    weight = graph.shape_of(node.input[1]) if len(node.input) > 1 else None
    kernel = given.get("kernel_shape") or (weight[2:] if weight else ())
    parts = ["x".join(map(str, kernel))] if kernel else []
    for key, mark in (("strides", "/"), ("dilations", "d")):
        values = [int(value) for value in given.get(key, ())]
        if set(values) - {1}:
            parts.append(mark + (str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))))
    if int(given.get("group", 1)) > 1:
        parts.append(f"g{given['group']}")
    return " ".join(parts)
