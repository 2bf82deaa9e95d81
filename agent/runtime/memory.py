"""The memory of a graph's tensors.

Promises one allocation for each storage, made when it is first used. Inputs, weights and outputs of load-time
nodes have their own memory, since they must survive a run. The parts of a join (`agent.bundle.joins`) are in
the memory of its output. Leaves it to the planner that wrote the graph whether two tensors may share a
storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from agent.bundle.graph import Graph
from agent.bundle.joins import joined, roots_of
from agent.runtime.shared_memory import SharedMemory
from agent.runtime.storage import Array, Block, allocate, view

_NO_ROOTS: Final[frozenset[int]] = frozenset()


class GraphMemory:
    """The memory of one graph's entries; with `shared`, inputs and storages are shared with other graphs.

    The *root* of an entry is the entry whose value it has: itself or, through `__nop`, another. A root that
    is part of a join is in the memory of its *owner*; any other is its own owner.

    Attributes
    ----------
    root
        Entry id -> its root.
    freed
        Roots whose memory was freed.
    """

    def __init__(self, graph: Graph, shared: SharedMemory | None = None) -> None:
        self._graph = graph
        self._shared = shared
        self.root = roots_of(graph)
        self._joined = joined(graph, self.root)
        self._names = {graph.node_row_ptr[i]: graph.nodes[i].name for i in graph.arg_nodes}
        self._arguments = frozenset(self._names)
        self._constant = _NO_ROOTS
        # By root: its own memory, and the caller's, which takes precedence.
        self._own: dict[int, Block] = {}
        self._adopted: dict[int, Block] = {}
        # By storage. Their sizes are computed once, for they take as long as the graph.
        self._pools: dict[int, Block] = {}
        self._sizes: dict[int, int] = {}
        # By entry: making a view takes longer than copying a row of numbers into it.
        self._views: dict[int, Array] = {}
        self.freed: set[int] = set()

    def array(self, entry: int) -> Array:
        """Return an entry's memory as a tensor of its dtype and shape, and allocate it at the first use.

        The array is kept and returned again: only its elements may be changed.
        """
        kept = self._views.get(entry)
        if kept is None:
            block = self._block(self.root[entry])
            kept = self._views[entry] = view(block, self._graph.dltype[entry], self._graph.shape[entry])
        return kept

    @property
    def left_out(self) -> frozenset[int]:
        """Ids of the nodes that a run leaves out, because their parts are in place."""
        return self._joined.nodes

    def owner(self, entry: int) -> int:
        """Return the entry in whose memory an entry is."""
        root = self.root[entry]
        place = self._joined.places.get(root)
        return root if place is None else place.owner

    def adopt(self, entry: int, value: Array) -> None:
        """Use the caller's aligned array as the memory of an entry's root."""
        self._views.clear()
        self._adopted[self.root[entry]] = value.reshape(-1).view("uint8")

    def own(self, root: int) -> Block:
        """Return a root's own memory, allocated if necessary, and use it from now on."""
        self.freed.discard(root)
        if self._adopted.pop(root, None) is not None:
            self._views.clear()
        block = self._own.get(root)
        if block is None:
            block = self._own[root] = self._made(root)
        return block

    def share(self, root: int, block: Block) -> None:
        """Use a block that another graph filled as a root's own memory."""
        self._views.clear()
        self._own[root] = block
        self.freed.discard(root)

    def free(self, root: int) -> None:
        """Free a root's own memory."""
        self._views.clear()
        self._own.pop(root, None)
        self.freed.add(root)

    def set_constant(self, roots: Iterable[int]) -> None:
        """Set which roots load-time nodes write; outputs of all other kernels move into their storages."""
        self._constant = frozenset(roots)
        self._joined = joined(self._graph, self.root, self._constant)
        self._views.clear()
        self._pools.clear()
        self._sizes = {}
        for root in self._own.keys() - self._constant - self._arguments:
            del self._own[root]

    def storage_bytes(self) -> dict[int, int]:
        """Return the size of each storage, without roots that have their own memory or are parts of joins."""
        sizes: dict[int, int] = {}
        for entry, storage in enumerate(self._graph.storage_id):
            if not self._is_own(self.root[entry]) and self.root[entry] not in self._joined.places:
                sizes[storage] = max(sizes.get(storage, 0), self._graph.spec(entry).nbytes)
        return sizes

    def input_bytes(self) -> dict[str, int]:
        """Return the size of each input by its name, without the weights."""
        names = self._names.items()
        return {name: self._graph.spec(e).nbytes for e, name in names if e not in self._constant}

    def _made(self, root: int) -> Block:
        nbytes = self._graph.spec(root).nbytes
        if self._shared is not None and root in self._arguments and root not in self._constant:
            return self._shared.input(self._names[root])[:nbytes]
        return allocate(nbytes)

    def _block(self, root: int) -> Block:
        adopted = self._adopted.get(root)
        if adopted is not None:
            return adopted
        if self._is_own(root):
            return self.own(root)
        place = self._joined.places.get(root)
        if place is not None:
            return self._block(place.owner)[place.offset : place.offset + self._graph.spec(root).nbytes]
        storage = self._graph.storage_id[root]
        block = self._pools.get(storage)
        if block is None:
            block = self._pools[storage] = self._pool(storage)
        return block

    def _pool(self, storage: int) -> Block:
        sizes = self._sizes = self._sizes or self.storage_bytes()
        if self._shared is None:
            return allocate(sizes[storage])
        ranked = sorted(sizes, key=lambda each: (-sizes[each], each))
        return self._shared.pool(ranked.index(storage))[: sizes[storage]]

    def _is_own(self, root: int) -> bool:
        return root in self._arguments or root in self._constant
