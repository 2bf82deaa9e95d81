"""Several graphs over one library and one file of weights.

Promises that equal kernels exist once, and equal weights once, whatever they are called in each graph. Leaves
it to the executor to share what it makes of weights when it loads them (`agent.runtime.shared_memory`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import tirx

from agent.bundle.graph import Graph
from agent.bundle.node import Node
from agent.bundle.tensor_spec import TensorSpec
from builder.calls.spans import Names
from builder.codegen.graph_codegen import GeneratedGraph

Weight = tuple[TensorSpec, npt.NDArray[np.generic]]


@dataclass
class MergedGraphs:
    """Graphs that were merged so far.

    Attributes
    ----------
    graphs
        In the order in which they were added.
    kernels
        Name -> scheduled function, with that name as its `global_symbol`.
    weights
        Spec and data of each weight.
    sources
        As `GeneratedGraph.sources`, of each graph.
    added, calls
        How many kernels each graph added, and how many different ones it calls.
    """

    graphs: list[Graph] = field(default_factory=list)
    kernels: dict[str, tirx.PrimFunc] = field(default_factory=dict)
    weights: list[Weight] = field(default_factory=list)
    sources: list[tuple[Names, ...]] = field(default_factory=list)
    added: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    _by_content: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)
    _by_hash: dict[int, list[str]] = field(default_factory=dict)

    def add(self, generated: GeneratedGraph, kernels: tvm.IRModule) -> Graph:
        """Merge one more graph, and return it with its new names.

        Parameters
        ----------
        generated
            The graph, with its weights.
        kernels
            The scheduled functions that it calls, each with a `global_symbol`.
        """
        before = len(self.kernels)
        symbols = {var.name_hint: self._kernel(var.name_hint, f) for var, f in kernels.functions.items()}
        taken = {spec.name for spec in generated.inputs}
        weights = {spec.name: self._weight(spec, data, taken) for spec, data in generated.params}
        graph = generated.graph
        nodes = [self._renamed(node, symbols, weights) for node in graph.nodes]
        merged = replace(graph, nodes=tuple(nodes))
        self.graphs.append(merged)
        self.sources.append(generated.sources)
        self.added.append(len(self.kernels) - before)
        self.calls.append(len(set(symbols.values())))
        return merged

    def module(self) -> tvm.IRModule:
        """Return all kernels as a module."""
        return tvm.IRModule(dict(self.kernels))

    @staticmethod
    def _renamed(node: Node, symbols: dict[str, str], weights: dict[str, str]) -> Node:
        if node.is_null:
            return replace(node, name=weights.get(node.name, node.name))
        return replace(node, func_name=symbols.get(node.func_name, node.func_name))

    def _kernel(self, name: str, function: tirx.PrimFunc) -> str:
        bare = function.without_attr("global_symbol")
        key = int(tvm_ffi.structural_hash(bare))
        for known in self._by_hash.setdefault(key, []):
            if tvm_ffi.structural_equal(self.kernels[known].without_attr("global_symbol"), bare):
                return known
        own, number = name, 1
        while own in self.kernels:
            number += 1
            own = f"{name}_{number}"
        self.kernels[own] = function.with_attr("global_symbol", own)
        self._by_hash[key].append(own)
        return own

    def _weight(self, spec: TensorSpec, data: npt.NDArray[np.generic], taken: set[str]) -> str:
        key = (str(data.dtype), data.shape, hashlib.sha256(data.tobytes()).digest())
        if key not in self._by_content:
            name = f"p{len(self.weights)}"
            while name in taken:
                name += "_"
            self._by_content[key] = name
            self.weights.append((TensorSpec(name, spec.datatype, spec.shape), data))
        return self._by_content[key]
