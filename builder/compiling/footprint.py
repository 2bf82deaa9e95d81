"""The memory that a graph takes on a device, for the manifest.

Follows the executor (`agent.runtime`): which weights it keeps, which it frees while it loads, and what a run
allocates. Leaves to others what does not grow with the model: the worker's Python, its threads' stacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent.bundle.buckets import Buckets
from agent.bundle.graph import Graph
from agent.bundle.manifest import Resources
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime import load_time
from agent.runtime.bucketed_module import staged_bytes
from agent.runtime.memory import GraphMemory
from agent.runtime.shared_memory import SharedMemory, reuse_of
from agent.runtime.storage import ALIGNMENT
from builder.codegen.workspaces import Workspaces


def resources_of(
    graphs: Sequence[Graph],
    params: Iterable[str],
    workspaces: Workspaces,
    buckets: Buckets | None,
    inputs: Sequence[TensorSpec],
) -> Resources:
    """Add up what a model needs to run.

    `graphs`: the graphs with planned storages, one for each bucket, the largest last: they are loaded from
        the last to the first.
    """
    names, shared = set(params), SharedMemory()
    kept: dict[int, int] = {}  # the key of each constant that a graph before has kept -> bytes
    loading = 0
    for graph in reversed(graphs):
        memory = GraphMemory(graph)
        arguments = {graph.node_row_ptr[i]: graph.nodes[i].name for i in graph.arg_nodes}
        weights = {entry for entry, name in arguments.items() if name in names}
        found = load_time.find(graph, memory, weights)
        memory.set_constant(found.constant)
        reuse = reuse_of(graph, memory, found, shared.keys_of(graph, memory, found), kept)
        steps, _ = load_time.steps_of(graph, memory, found, weights, reuse)
        held: set[int] = set()
        for step in steps:
            held.update(step.loads, range(graph.node_row_ptr[step.node], graph.node_row_ptr[step.node + 1]))
            now = sum(graph.spec(root).nbytes + ALIGNMENT for root in held)
            loading = max(loading, now + sum(kept.values()))
            held.difference_update(step.frees)
        kept |= {key: graph.spec(root).nbytes + ALIGNMENT for root, key in reuse.keys.items()}
        shared.reserve(memory.input_bytes(), memory.storage_bytes().values())
    constants = sum(kept.values())
    staged = 0 if buckets is None else staged_bytes(buckets, inputs)
    running = constants + shared.input_and_pool_bytes + staged
    return Resources(
        arena_bytes=max(running, loading) - constants + workspaces.caller_bytes,
        params_bytes=constants,
        thread_bytes=workspaces.worker_bytes,
    )
