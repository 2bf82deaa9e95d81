"""Joins: calls whose output is their inputs, one after another, so that nothing must be copied.

A concatenation is such a call if each of its parts is one contiguous range of the result. A reader may then
give the parts the memory of these ranges, and leave out the call. mod.json has no offsets: they follow from
the sizes of the parts. Promises that every part of a join that is in place lies within the memory of the
value that it is a part of, aligned, and that no two parts overlap. Leaves it to the planner that wrote the
graph that the storage of a join has no other use while its parts are alive.

A reader that does not know joins makes the call, and computes the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.bundle.node import NOP
from agent.errors import FormatError

if TYPE_CHECKING:
    from agent.bundle.graph import Graph

# What kernels assume of every argument (`agent.runtime.storage.ALIGNMENT`), so of a part too.
ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies: so many bytes, a multiple of `ALIGNMENT`, from the beginning of its owner's memory.

    The owner is the output of a join that is no part of another one.
    """

    owner: int
    offset: int


@dataclass(frozen=True, slots=True)
class Joined:
    """The joins of a graph that are in place: the `nodes` that a run leaves out, by id.

    `places` has the place of each of their parts, by the entry that has its memory (see `roots_of`).
    """

    nodes: frozenset[int]
    places: Mapping[int, Place]


def roots_of(graph: Graph) -> list[int]:
    """Return for each entry the one whose memory it is: itself or, through `__nop`, another."""
    root = list(range(graph.num_entries))
    for i, node in enumerate(graph.nodes):
        if node.func_name == NOP:
            root[graph.node_row_ptr[i]] = root[graph.entry_id(node.inputs[0])]
    return root


def check_joins(graph: Graph) -> None:
    """Check that the parts of every join can be placed in its output, or raise FormatError.

    They fill the output and are aligned, and none is an input or output of the graph, or part of two joins.
    """
    if not any(node.joins for node in graph.nodes):
        return
    root = roots_of(graph)
    fixed = {graph.node_row_ptr[i]: "an input" for i in graph.arg_nodes}
    fixed |= {root[graph.entry_id(head)]: "an output of the graph" for head in graph.heads}
    for i, node in enumerate(graph.nodes):
        if not node.joins:
            continue
        offset = 0
        for part, nbytes in _parts(graph, root, i):
            if part in fixed:
                raise FormatError(f"node {i} joins its inputs, but one of them is {fixed[part]}")
            if offset % ALIGNMENT:
                raise FormatError(f"node {i} joins its inputs, but one would begin at byte {offset}")
            if graph.dltype[part] != graph.dltype[graph.node_row_ptr[i]]:
                raise FormatError(f"node {i} joins its inputs, but they have another dtype than its output")
            fixed[part] = "part of a join already"
            offset += nbytes
        whole = graph.spec(graph.node_row_ptr[i]).nbytes
        if offset != whole:
            raise FormatError(f"node {i} joins its inputs: expected {whole} bytes in all, got {offset}")


def joined(graph: Graph, root: list[int], constant: Collection[int] = ()) -> Joined:
    """Return the joins that are in place, and where their parts are.

    Parameters
    ----------
    graph, root
        The graph, and what `roots_of` returns for it.
    constant
        Entries that are computed at load, and have their own memory: a join of such a part is not in place.
    """
    nodes: set[int] = set()
    places: dict[int, Place] = {}
    # From the last to the first: when a join is met, it is known whether its output is part of a later one.
    for i in reversed(range(len(graph.nodes))):
        if not graph.nodes[i].joins:
            continue
        parts = list(_parts(graph, root, i))
        if any(part in constant for part, _ in parts):
            continue
        output = graph.node_row_ptr[i]
        whole = places.get(output, Place(output, 0))
        nodes.add(i)
        offset = whole.offset
        for part, nbytes in parts:
            places[part] = Place(whole.owner, offset)
            offset += nbytes
    return Joined(frozenset(nodes), places)


def _parts(graph: Graph, root: list[int], i: int) -> Iterator[tuple[int, int]]:
    """Yield root and size in bytes of each input of a node."""
    for entry in graph.nodes[i].inputs:
        part = root[graph.entry_id(entry)]
        yield part, graph.spec(part).nbytes
