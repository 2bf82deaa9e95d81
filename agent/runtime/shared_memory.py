"""Memory that the graphs of one model share: only one of them runs at a time.

Promises three kinds of sharing. A *constant* (a weight, or what load-time nodes make of it) that several
graphs compute in the same way is computed and stored once. An *input* is as large as its largest form. A
*pool* of activations is as large as the largest storage of its rank: each graph's storages are ranked by
size, so the whole is about as large as that of the largest graph. Leaves to `GraphMemory` which entries are
which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent.bundle.graph import Graph
from agent.bundle.node import NOP
from agent.runtime.storage import ALIGNMENT, Block, allocate

if TYPE_CHECKING:
    from agent.runtime.load_time import LoadTime
    from agent.runtime.memory import GraphMemory


class SharedMemory:
    """The memory that several graphs share."""

    def __init__(self) -> None:
        self._keys: dict[object, int] = {}
        self._constants: dict[int, Block] = {}
        self._inputs: dict[str, Block] = {}
        self._input_bytes: dict[str, int] = {}
        self._pools: dict[int, Block] = {}
        self._pool_bytes: list[int] = []

    def reserve(self, inputs: Mapping[str, int], pools: Iterable[int]) -> None:
        """Make room for a graph's inputs (name -> bytes) and storages (bytes); call it for every graph first.

        Raises
        ------
        RuntimeError
            If memory was handed out before.
        """
        if self._inputs or self._pools:
            raise RuntimeError("expected all graphs to be reserved before one of them runs")
        for name, nbytes in inputs.items():
            self._input_bytes[name] = max(nbytes, self._input_bytes.get(name, 0))
        for rank, nbytes in enumerate(sorted(pools, reverse=True)):
            if rank == len(self._pool_bytes):
                self._pool_bytes.append(0)
            self._pool_bytes[rank] = max(self._pool_bytes[rank], nbytes)

    @property
    def input_and_pool_bytes(self) -> int:
        """What inputs and pools take, with their alignment."""
        sizes = [*self._input_bytes.values(), *self._pool_bytes]
        return sum(size + ALIGNMENT for size in sizes)

    def input(self, name: str) -> Block:
        """Return an input's memory, of its largest size."""
        if name not in self._inputs:
            self._inputs[name] = allocate(self._input_bytes[name])
        return self._inputs[name]

    def pool(self, rank: int) -> Block:
        """Return the memory of each graph's storage of this rank."""
        if rank not in self._pools:
            self._pools[rank] = allocate(self._pool_bytes[rank])
        return self._pools[rank]

    def constant(self, key: int) -> Block | None:
        """Return a constant that a graph has kept, or None."""
        return self._constants.get(key)

    def keep(self, key: int, block: Block) -> None:
        """Keep a constant for the graphs to come."""
        self._constants[key] = block

    def keys_of(self, graph: Graph, memory: GraphMemory, load_time: LoadTime) -> dict[int, int]:
        """Return a key for each constant root: two roots with the same key hold the same bytes.

        A weight is identified by its name; what a node computes by its kernel, the keys of what it reads, and
        all shapes and datatypes. Kernels of the same name are the same, since all graphs use one library.
        """
        keys: dict[int, int] = {}
        for i in graph.arg_nodes:
            entry = graph.node_row_ptr[i]
            if entry in load_time.constant:
                keys[entry] = self._key(("weight", graph.nodes[i].name))
        for i in load_time.nodes:
            node = graph.nodes[i]
            if node.func_name == NOP:
                continue
            read = tuple(
                (keys[memory.root[entry]], graph.dltype[entry], graph.shape[entry])
                for entry in map(graph.entry_id, node.inputs)
            )
            written = range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1])
            made = tuple((graph.dltype[entry], graph.shape[entry]) for entry in written)
            for index, entry in enumerate(written):
                keys[entry] = self._key((node.func_name, node.flatten_data, read, made, index))
        return keys

    def _key(self, identity: object) -> int:
        return self._keys.setdefault(identity, len(self._keys))


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a graph takes from the graphs before it.

    `keys` are those of the roots of constants that the graph keeps, `taken` the roots that an earlier graph
    has kept, and `nodes` the load-time nodes that it runs itself, in order.
    """

    keys: Mapping[int, int]
    taken: frozenset[int]
    nodes: tuple[int, ...]


def reuse_of(
    graph: Graph, memory: GraphMemory, load_time: LoadTime, keys: Mapping[int, int], known: Iterable[int]
) -> Reuse:
    """Decide what a graph takes from others, and which load-time nodes it runs for the rest.

    Parameters
    ----------
    graph, memory, load_time
        The graph, where its tensors are, and its load-time nodes.
    keys
        What `SharedMemory.keys_of` returned.
    known
        Keys of the constants that earlier graphs have kept.
    """
    skipped, there = set(load_time.nodes), set(known)
    read = {memory.root[graph.entry_id(entry)] for entry in graph.heads}
    for i, node in enumerate(graph.nodes):
        if i not in skipped:
            read.update(memory.root[graph.entry_id(entry)] for entry in node.inputs)
    kept = {root: keys[root] for root in read & load_time.constant}
    taken = {root for root, key in kept.items() if key in there}
    needed = kept.keys() - taken
    nodes = []
    for i in reversed(load_time.nodes):
        made = range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1])
        if graph.nodes[i].func_name != NOP and not needed.isdisjoint(made):
            nodes.append(i)
            needed = needed | {memory.root[graph.entry_id(entry)] for entry in graph.nodes[i].inputs}
    return Reuse(kept, frozenset(taken), tuple(reversed(nodes)))
