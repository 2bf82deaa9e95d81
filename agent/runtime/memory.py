"""Where each tensor of a graph lies.

Promises one allocation for each storage, made when it is first asked for; inputs, weights and what load-time
nodes write have memory of their own, for it must survive a run. Leaves it to the planner that wrote the graph
whether two tensors may share a storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agent.bundle.graph import NOP, Graph
from agent.runtime.storage import Array, Block, allocate, view

_NO_ROOTS: Final[frozenset[int]] = frozenset()


class GraphMemory:
    """The memory of one graph's entries.

    A *root* is the entry whose memory an entry is: its own, or through `__nop` another's.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.root = list(range(graph.num_entries))
        for i, node in enumerate(graph.nodes):
            if node.func_name == NOP:
                self.root[graph.node_row_ptr[i]] = self.root[graph.entry_id(node.inputs[0])]
        self._arguments = frozenset(graph.node_row_ptr[i] for i in graph.arg_nodes)
        self._constant = _NO_ROOTS
        # By root: memory of its own, and the caller's, which goes before any other.
        self._own: dict[int, Block] = {}
        self._adopted: dict[int, Block] = {}
        # By storage.
        self._pools: dict[int, Block] = {}
        self.freed: set[int] = set()

    def array(self, entry: int) -> Array:
        """Return an entry's memory as a tensor, allocating it if it has none yet."""
        root = self.root[entry]
        return view(self._block(root), self._graph.dltype[entry], self._graph.shape[entry])

    def adopt(self, entry: int, value: Array) -> None:
        """Let an entry, and what shares its memory through `__nop`, lie in the caller's aligned array."""
        self._adopted[self.root[entry]] = value.reshape(-1).view("uint8")

    def own(self, root: int) -> Block:
        """Return a root's own memory, allocating it if need be, and let the entry lie there."""
        self.freed.discard(root)
        self._adopted.pop(root, None)
        block = self._own.get(root)
        if block is None:
            block = self._own[root] = allocate(self._graph.spec(root).nbytes)
        return block

    def free(self, root: int) -> None:
        """Give up a root's own memory."""
        self._own.pop(root, None)
        self.freed.add(root)

    def set_constant(self, roots: Iterable[int]) -> None:
        """Say what load-time nodes write; every other kernel's output moves into its storage's pool."""
        self._constant = frozenset(roots)
        self._pools.clear()
        for root in self._own.keys() - self._constant - self._arguments:
            del self._own[root]

    def _block(self, root: int) -> Block:
        adopted = self._adopted.get(root)
        if adopted is not None:
            return adopted
        if self._is_own(root):
            return self.own(root)
        storage = self._graph.storage_id[root]
        block = self._pools.get(storage)
        if block is None:
            sizes = (
                self._graph.spec(entry).nbytes
                for entry, each in enumerate(self._graph.storage_id)
                if each == storage and not self._is_own(self.root[entry])
            )
            block = self._pools[storage] = allocate(max(sizes))
        return block

    def _is_own(self, root: int) -> bool:
        return root in self._arguments or root in self._constant
