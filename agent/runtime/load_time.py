"""Load-time nodes, which depend only on weights: find them, run them once, and free the weights they read.

A weight transform (packing, Winograd) is such a node: the bundle carries the model's own weights, and the
device computes the transformed ones once, so they take memory but no space in the file. A classic executor
runs these nodes every time and computes the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from agent.bundle.graph import Graph
from agent.bundle.node import NOP
from agent.bundle.params import ParamEntry
from agent.errors import InputError
from agent.runtime.memory import GraphMemory
from agent.runtime.shared_memory import Reuse, SharedMemory, reuse_of


@dataclass(frozen=True, slots=True)
class LoadTime:
    """The load-time nodes of a graph, in order; `GraphMemory` explains roots.

    `constant` are the roots of the weights and of the nodes' outputs, `consumed` those of the weights that
    the nodes' kernels read.
    """

    nodes: tuple[int, ...]
    constant: frozenset[int]
    consumed: frozenset[int]


def find(graph: Graph, memory: GraphMemory, params: Iterable[int]) -> LoadTime:
    """Find the nodes that depend only on weights.

    Parameters
    ----------
    graph, memory
        The graph, and where its tensors are.
    params
        Entry ids of the weights.
    """
    nodes = []
    weights = set(params)
    constant = set(weights)
    consumed = set()
    for i, node in enumerate(graph.nodes):
        roots = [memory.root[graph.entry_id(entry)] for entry in node.inputs]
        if roots and constant.issuperset(roots):
            nodes.append(i)
            if node.func_name != NOP:
                constant.update(range(graph.node_row_ptr[i], graph.node_row_ptr[i + 1]))
                consumed.update(weights.intersection(roots))
    return LoadTime(tuple(nodes), frozenset(constant), frozenset(consumed))


@dataclass(frozen=True, slots=True)
class Step:
    """One load-time node, by its id.

    `loads` are the roots of the weights that are loaded before it, and `frees` those whose memory is freed
    after it.
    """

    node: int
    loads: tuple[int, ...]
    frees: tuple[int, ...]


def steps_of(
    graph: Graph,
    memory: GraphMemory,
    load_time: LoadTime,
    given: Iterable[int],
    reuse: Reuse | None = None,
) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """Order the loading of weights so that few are in memory at a time.

    Parameters
    ----------
    graph, memory
        The graph, and where its tensors are.
    load_time
        The nodes to run.
    given
        Entry ids of the weights that are loaded.
    reuse
        What the graph takes from other graphs, and which nodes it runs itself; None for a graph of its own.

    Returns
    -------
    steps, rest
        The nodes in order, and the roots of the weights that are loaded in the end.
    """
    run = load_time.nodes if reuse is None else reuse.nodes
    nodes = [i for i in run if graph.nodes[i].func_name != NOP]
    inputs = {i: [memory.root[graph.entry_id(entry)] for entry in graph.nodes[i].inputs] for i in nodes}
    kept = {memory.root[graph.entry_id(entry)] for entry in graph.heads}
    skipped = set(load_time.nodes)
    for i, node in enumerate(graph.nodes):
        if i not in skipped:
            kept.update(memory.root[graph.entry_id(entry)] for entry in node.inputs)
    reads = Counter(root for roots in inputs.values() for root in roots)
    waiting = set(given)
    steps = []
    for i in nodes:
        reads.subtract(inputs[i])
        frees = {root for root in inputs[i] if not reads[root] and root not in kept}
        steps.append(Step(i, tuple(sorted(waiting.intersection(inputs[i]))), tuple(sorted(frees))))
        waiting.difference_update(inputs[i])
    return tuple(steps), tuple(sorted((waiting & kept) - (reuse.taken if reuse else frozenset())))


def fold(
    graph: Graph,
    memory: GraphMemory,
    load_time: LoadTime,
    *,
    given: Mapping[int, ParamEntry],
    data: memoryview,
    execute: Callable[[int], None],
    shared: SharedMemory | None = None,
) -> None:
    """Load the weights and run the load-time nodes, holding as few weights at a time as their order allows.

    `given` has the weights by entry id, and `data` is the parameter file that they are in. `execute` runs a
    node by its id; what other graphs have computed in `shared` is not computed again. A weight that a node
    needs, and that was freed before and is not given, raises InputError; a kernel that fails raises
    ExecutionError.
    """
    missing = (load_time.consumed & memory.freed) - given.keys()
    if missing:
        name = graph.nodes[_node_of(graph, min(missing))].name
        raise InputError(f"weight {name!r} was freed before: load all weights at once")
    reuse = None if shared is None else _reused(graph, memory, load_time, shared)
    steps, rest = steps_of(graph, memory, load_time, given, reuse)
    for step in steps:
        for root in step.loads:
            _load(memory, root, given[root], data)
        execute(step.node)
        for root in step.frees:
            memory.free(root)
    for root in rest:
        _load(memory, root, given[root], data)
    if shared is not None and reuse is not None:
        for root in reuse.keys.keys() - reuse.taken:
            shared.keep(reuse.keys[root], memory.own(root))


def _reused(graph: Graph, memory: GraphMemory, load_time: LoadTime, shared: SharedMemory) -> Reuse:
    """Take what other graphs have computed."""
    keys = shared.keys_of(graph, memory, load_time)
    known = {key for key in keys.values() if shared.constant(key) is not None}
    reuse = reuse_of(graph, memory, load_time, keys, known)
    for root in reuse.taken:
        block = shared.constant(reuse.keys[root])
        assert block is not None
        memory.share(root, block)
    return reuse


def _load(memory: GraphMemory, root: int, param: ParamEntry, data: memoryview) -> None:
    memory.own(root)[:] = np.frombuffer(data, np.uint8, param.nbytes, param.offset)


def _node_of(graph: Graph, entry: int) -> int:
    return next(i for i in graph.arg_nodes if graph.node_row_ptr[i] == entry)
