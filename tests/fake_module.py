"""Graphs of kernels in numpy with a compiled module's interface: `module[name](*inputs, *outputs)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from agent.bundle.graph import Graph
from agent.bundle.node import JOINS, Node, NodeEntry
from agent.bundle.params import dump_params
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.storage import allocate, view

Array = np.ndarray[Any, Any]


def _add(a: Array, b: Array, out: Array) -> None:
    np.add(a, b, out=out)


def _relu(a: Array, out: Array) -> None:
    np.maximum(a, 0, out=out)


def _dense(a: Array, b: Array, out: Array) -> None:
    np.matmul(a, b, out=out)


def _double(a: Array, out: Array) -> None:
    np.multiply(a, 2, out=out)


def _split(a: Array, low: Array, high: Array) -> None:
    half = a.shape[-1] // 2
    low[...], high[...] = a[..., :half], a[..., half:]


def _fail(*arrays: Array) -> None:
    raise ValueError("this kernel\nalways fails")


def _sum(a: Array, out: Array) -> None:
    out[...] = a.sum(dtype=out.dtype)


def _join(*arrays: Array) -> None:
    *parts, out = arrays
    out.reshape(-1)[...] = np.concatenate([part.reshape(-1) for part in parts])


KERNELS: dict[str, Callable[..., None]] = {
    "add": _add,
    "relu": _relu,
    "dense": _dense,
    "double": _double,
    "split": _split,
    "fail": _fail,
    "sum": _sum,
    "join": _join,
}


class FakeModule:
    """A module of kernels, by default `KERNELS`, that counts their calls."""

    def __init__(self, kernels: dict[str, Callable[..., None]] | None = None) -> None:
        self._kernels = KERNELS if kernels is None else kernels
        self.calls: Counter[str] = Counter()

    def __getitem__(self, name: str) -> Callable[..., None]:
        kernel = self._kernels[name]

        def counted(*arrays: Array) -> None:
            self.calls[name] += 1
            kernel(*arrays)

        return counted


class GraphBuilder:
    """Builds a graph node by node; each tensor gets a new storage unless `storage` names one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.dltype: list[str] = []
        self.shape: list[tuple[int, ...]] = []
        self.storage: list[int] = []
        self.heads: list[NodeEntry] = []
        self._first: list[int] = []

    def input(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> NodeEntry:
        return self._append(Node.null(name), [shape], dtype)

    def call(
        self,
        func: str,
        inputs: list[NodeEntry],
        *shapes: tuple[int, ...],
        dtype: str = "float32",
        storage: int | None = None,
        joins: bool = False,
    ) -> NodeEntry:
        name = f"{func}_{len(self.nodes)}"
        node = Node.call(name, func, inputs, len(shapes), **({JOINS: "1"} if joins else {}))
        return self._append(node, list(shapes), dtype, storage)

    def reshape(self, entry: NodeEntry, shape: tuple[int, ...]) -> NodeEntry:
        source = self._first[entry.node_id] + entry.index
        node = Node.call(f"reshape_{len(self.nodes)}", "__nop", [entry])
        return self._append(node, [shape], self.dltype[source], self.storage[source])

    def storage_of(self, entry: NodeEntry) -> int:
        return self.storage[self._first[entry.node_id] + entry.index]

    def graph(self, *heads: NodeEntry) -> Graph:
        return Graph.build(self.nodes, heads, self.dltype, self.storage, self.shape)

    def _append(
        self, node: Node, shapes: list[tuple[int, ...]], dtype: str, storage: int | None = None
    ) -> NodeEntry:
        self._first.append(len(self.dltype))
        self.nodes.append(node)
        for shape in shapes:
            self.dltype.append(dtype)
            self.shape.append(shape)
            self.storage.append(len(self.storage) if storage is None else storage)
        return NodeEntry(len(self.nodes) - 1)


def params(**arrays: Array) -> bytes:
    """Return the content of a mod.params with these arrays."""
    return dump_params(
        (TensorSpec.from_dtype(name, str(array.dtype), array.shape), np.ascontiguousarray(array).data)
        for name, array in arrays.items()
    )


def aligned(array: Array) -> Array:
    """Return a copy of an array in memory that kernels may use."""
    out = view(allocate(array.nbytes), str(array.dtype), array.shape)
    out[...] = array
    return out
