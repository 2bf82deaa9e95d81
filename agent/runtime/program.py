"""The calls of a graph, with their arguments bound.

Promises that a run is a loop over calls that allocates nothing. Trusts kernels to stay in their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import numpy as np
import tvm_ffi

from agent.bundle.graph import Graph
from agent.bundle.layer import Layer, shorten
from agent.bundle.node import COPY, NOP
from agent.errors import ExecutionError, FormatError
from agent.runtime.memory import GraphMemory
from agent.runtime.module import Kernel
from agent.runtime.storage import Array

# Errors of a kernel's own checks (the kinds that tvm-ffi has), and of kernels written in numpy.
_KERNEL_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)

_NODES_CHARS: Final = 160  # of a model's nodes in an error message

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Kernels(Protocol):
    """Kernels by name: a `KernelModule`, TVM's module, or a dictionary of functions on numpy arrays."""

    def __getitem__(self, name: str, /) -> Kernel:
        """Return the kernel named `name`."""


class Program:
    """The calls of a graph, by node, in order; a kernel that does not exist raises FormatError.

    `bound` says whether `steps` and `calls` are up to date.
    """

    def __init__(self, graph: Graph, memory: GraphMemory, kernels: Kernels) -> None:
        self._graph = graph
        self._memory = memory
        self._functions = {
            node.func_name: _resolve(kernels, node.func_name)
            for node in graph.nodes
            if not node.is_null and node.func_name != NOP
        }
        self._flush = _optional(kernels, "edge_flush_denormals")
        self._readers: dict[int, list[int]] = {}
        self.steps: list[int] = []
        self.calls: list[Call] = []
        self.bound = False

    def bind(self, skipped: Iterable[int]) -> None:
        """Bind the arguments of every call of a run; `skipped` are the nodes that ran at load time."""
        left_out = self._memory.left_out.union(skipped)
        self.steps = [
            i
            for i, node in enumerate(self._graph.nodes)
            if not node.is_null and node.func_name != NOP and i not in left_out
        ]
        self.calls = [self.call(i) for i in self.steps]
        self._readers = {}
        for index, i in enumerate(self.steps):
            for entry in self.entries(i):
                self._readers.setdefault(self._memory.owner(entry), []).append(index)
        self.bound = True

    def rebind(self, owner: int) -> None:
        """Rebind the calls that use the memory of an entry, which has moved."""
        if self.bound:
            for index in self._readers.get(owner, ()):
                self.calls[index] = self.call(self.steps[index])

    def run(self) -> None:
        """Make all calls, with zeros in place of denormal numbers, which are slow on some processors."""
        arguments: tuple[Any, ...] = ()
        before = 1 if self._flush is None else self._flush(1)
        try:
            for function, arguments in self.calls:
                function(*arguments)
        except _KERNEL_ERRORS as error:
            # Each call has its own tuple of arguments, so the failed one is found without slowing down runs.
            index = next(i for i, call in enumerate(self.calls) if call[1] is arguments)
            raise self._failure(self.steps[index], error) from error
        finally:
            if not before and self._flush is not None:
                self._flush(0)

    def execute(self, i: int) -> None:
        """Bind and make the call of one node."""
        function, arguments = self.call(i)
        try:
            function(*arguments)
        except _KERNEL_ERRORS as error:
            raise self._failure(i, error) from error

    def call(self, i: int) -> Call:
        """Return a node's function and its arguments: inputs, then outputs."""
        node = self._graph.nodes[i]
        function = self._functions[node.func_name]
        arrays: list[Array] = [self._memory.array(entry) for entry in self.entries(i)]
        if node.flatten_data:
            arrays = [array.reshape(-1) for array in arrays]
        # Passing a tvm-ffi tensor takes a third of the time of passing a numpy array.
        native = isinstance(function, tvm_ffi.Function)
        return function, tuple(map(tvm_ffi.from_dlpack, arrays)) if native else tuple(arrays)

    def entries(self, i: int) -> list[int]:
        """Return the entry ids of a node's inputs and outputs, in the order of its arguments."""
        graph = self._graph
        inputs = [graph.entry_id(entry) for entry in graph.nodes[i].inputs]
        return inputs + list(range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1]))

    def _failure(self, i: int, error: BaseException) -> ExecutionError:
        node = self._graph.nodes[i]
        reason = " ".join(str(error).split())
        layer = Layer.from_attrs(node.attrs)
        of = f" ({shorten(', '.join(layer.nodes), _NODES_CHARS)})" if layer.nodes else ""
        return ExecutionError(f"node {node.name!r}, kernel {node.func_name}{of}: {reason:.400}")


def _resolve(kernels: Kernels, name: str) -> Kernel:
    if name == COPY:
        return _copy
    try:
        return kernels[name]
    except (AttributeError, KeyError) as error:
        raise FormatError(f"mod.json calls kernel {name!r}, which does not exist") from error


def _optional(kernels: Kernels, name: str) -> Kernel | None:
    """Return a function that older kernel libraries lack, None if `kernels` lacks it."""
    try:
        return kernels[name]
    except (AttributeError, KeyError, FormatError):
        return None


def _copy(source: Array, target: Array) -> None:
    np.copyto(target, source)
