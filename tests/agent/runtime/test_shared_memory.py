from __future__ import annotations

import pytest

from agent.bundle.graph import Graph
from agent.runtime import load_time
from agent.runtime.memory import GraphMemory
from agent.runtime.shared_memory import SharedMemory, reuse_of
from agent.runtime.storage import ALIGNMENT
from tests.fake_module import GraphBuilder


def graph(kernel: str = "double", weight: str = "w") -> Graph:
    g = GraphBuilder()
    packed = g.call(kernel, [g.input(weight, (3, 4))], (3, 4))
    return g.graph(g.call("dense", [g.input("x", (2, 3)), packed], (2, 4)))


def keys(shared: SharedMemory, made: Graph) -> set[int]:
    memory = GraphMemory(made)
    weights = {made.node_row_ptr[i] for i in made.arg_nodes if made.nodes[i].name.startswith("w")}
    found = load_time.find(made, memory, weights)
    return set(reuse_of(made, memory, found, shared.keys_of(made, memory, found), ()).keys.values())


def test_a_constant_is_known_by_its_kernel_and_what_that_reads() -> None:
    shared = SharedMemory()
    first = keys(shared, graph())
    assert keys(shared, graph()) == first
    assert keys(shared, graph("relu")).isdisjoint(first)
    assert keys(shared, graph(weight="w2")).isdisjoint(first)


def test_pools_are_as_large_as_the_largest_of_their_rank() -> None:
    shared = SharedMemory()
    shared.reserve({"x": 10}, [100, 300])
    shared.reserve({"x": 30, "z": 5}, [200, 150, 50])
    assert [shared.pool(rank).nbytes for rank in range(3)] == [300, 150, 50]
    assert (shared.input("x").nbytes, shared.input("z").nbytes) == (30, 5)
    assert shared.input_and_pool_bytes == 300 + 150 + 50 + 30 + 5 + 5 * ALIGNMENT
    with pytest.raises(RuntimeError, match="before one of them runs"):
        shared.reserve({}, [400])
