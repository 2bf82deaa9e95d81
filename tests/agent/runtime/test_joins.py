"""Joins in the executor: parts are made in their places, and the results are those of a copy."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from agent.bundle.graph import Graph
from agent.errors import InputError
from agent.runtime import graph_executor
from agent.runtime.memory import GraphMemory
from agent.runtime.storage import Array, Block, allocate
from builder.running import debug_executor
from tests.fake_module import FakeModule, GraphBuilder, aligned, params

X = np.random.default_rng(3).standard_normal(16, dtype=np.float32)
A, B = np.maximum(X, 0), X * 2
C = np.concatenate([A, B]) * 2
WHOLE = np.concatenate([A, B, C])


def dense_block(*, joins: bool = True, head: bool = False) -> Graph:
    """Return relu([[a, b], c]) where a = relu(x), b = 2x, c = 2[a, b]."""
    g = GraphBuilder()
    x = g.input("x", (16,))
    a, b = g.call("relu", [x], (16,)), g.call("double", [x], (16,))
    first = g.call("join", [a, b], (32,), joins=joins)
    c = g.call("double", [first], (32,))
    second = g.call("join", [first, g.reshape(c, (4, 8))], (64,), joins=joins)
    return g.graph(second if head else g.call("relu", [second], (64,)))


def poisoned(nbytes: int) -> Block:
    block = allocate(nbytes)
    block[...] = 0xFF  # NaN
    return block


def run(graph: Graph, fake: FakeModule) -> Array:
    with mock.patch("agent.runtime.memory.allocate", poisoned):
        module = graph_executor.create(graph, fake)
        module.run(x=X)
        return module.get_output(0)


def test_parts_are_made_in_place_and_nothing_is_copied() -> None:
    fake = FakeModule()
    np.testing.assert_array_equal(run(dense_block(), fake), np.maximum(WHOLE, 0))
    assert fake.calls == {"relu": 2, "double": 2}


def test_without_the_mark_the_same_graph_is_computed_by_copies() -> None:
    fake = FakeModule()
    np.testing.assert_array_equal(run(dense_block(joins=False), fake), np.maximum(WHOLE, 0))
    assert fake.calls["join"] == 2


def test_parts_take_no_memory_of_their_own() -> None:
    graph = dense_block()
    # The whole and the result: 64 floats each.
    assert sorted(GraphMemory(graph).storage_bytes().values()) == [256, 256]


def test_parts_lie_in_the_memory_of_the_whole() -> None:
    memory = GraphMemory(dense_block())
    whole = memory.array(6)
    for entry, begin, count in ((1, 0, 16), (2, 16, 16), (3, 0, 32), (4, 32, 32), (5, 32, 32)):
        part = memory.array(entry)
        assert part.ctypes.data == whole.ctypes.data + 4 * begin
        assert part.size == count
        assert part.ctypes.data % 64 == 0


def test_a_join_that_is_an_output_can_be_written_to_the_callers_memory() -> None:
    fake = FakeModule()
    module = graph_executor.create(dense_block(head=True), fake)
    module.run(x=X)
    np.testing.assert_array_equal(module.get_output(0), WHOLE)
    out = aligned(np.zeros(64, np.float32))
    module.set_output_zero_copy(0, out)
    module.run(x=-X)
    first = np.concatenate([np.maximum(-X, 0), -B])
    np.testing.assert_array_equal(out, np.concatenate([first, first * 2]))
    assert "join" not in fake.calls


def test_a_join_with_a_part_from_weights_is_copied() -> None:
    g = GraphBuilder()
    w, x = g.input("w", (16,)), g.input("x", (16,))
    parts = [g.call("double", [w], (16,)), g.call("relu", [x], (16,))]
    whole = g.call("join", parts, (32,), joins=True)
    fake = FakeModule()
    module = graph_executor.create(g.graph(g.call("double", [whole], (32,))), fake)
    module.load_params(params(w=X))
    for x_ in (X, -X):
        module.run(x=x_)
        np.testing.assert_array_equal(module.get_output(0), 2 * np.concatenate([B, np.maximum(x_, 0)]))
    assert fake.calls == {"double": 3, "relu": 2, "join": 2}
    # As inputs, the same weights are no constants: then the parts are in place.
    fake = FakeModule()
    module = graph_executor.create(g.graph(g.call("double", [whole], (32,))), fake)
    module.run(x=X, w=X)
    np.testing.assert_array_equal(module.get_output(0), 2 * np.concatenate([B, A]))
    assert "join" not in fake.calls


def test_debugging_sees_joins_but_does_not_time_them() -> None:
    module = debug_executor.create(dense_block(), FakeModule())
    module.set_input("x", X)
    outputs = [array for _, array in module.debug_get_outputs()]
    for got, want in zip(outputs, [A, B, WHOLE[:32], C, WHOLE, np.maximum(WHOLE, 0)], strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(module.debug_get_output(3), WHOLE[:32])
    assert [row.name for row in module.profile(number=1, x=X).rows] == ["relu", "double", "double", "relu"]
    assert [max(each) > 0 for each in module.run_individual(number=1)] == [
        *(False, True, True, False, True, False, False, True)
    ]
    with pytest.raises(InputError, match="a node that runs"):
        module.run_individual_node(3)
